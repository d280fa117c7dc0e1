"""Families that the engine serves with ``transformers``, or by itself: their log-probs and their updates."""

import random
from itertools import count

import pytest
import torch

from slime.backends.embedded_engine.admission import Limits
from slime.backends.embedded_engine.build import build_executor
from slime.backends.embedded_engine.checkpoint import load_checkpoint
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.model_config import ModelConfig
from tests.backends.embedded_engine.test_scheduler import make_state, mixed_requests, run_all, sequence
from tests.families import FAMILIES, stored_tensors, tiny_family, tolerance

pytestmark = pytest.mark.slow

LIMITS = Limits(rows=16, tokens=2048, chunk=64, context=128)
IDS = [(7 * i) % 256 for i in range(40)]


def serve(path):
    executor, weights = build_executor(path, ModelConfig.from_directory(path), LIMITS)
    load_checkpoint(weights, path)
    return executor, weights


@torch.inference_mode()
def stepwise(executor, prompt, rest):
    """Logits of a prompt, and then of one token after the other."""
    hidden = [executor.prefill([prompt], 0)[0]]
    for position, token in enumerate(rest, len(prompt)):
        ids, positions = torch.tensor([token]), torch.tensor([position])
        hidden.append(executor.decode(ids, positions, 0, position + 1))
    return executor.model.logits(torch.cat(hidden))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_prefill_and_decoding_are_those_of_transformers(tmp_path, family):
    model = tiny_family(family, tmp_path)
    executor, _ = serve(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    assert (stepwise(executor, IDS[:25], IDS[25:]) - expected).abs().max() < tolerance(family)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa-shared"])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_keys_of_equal_scores_are_chosen_alike_in_prefill_and_decoding(tmp_path, family, heads):
    """With few heads many scores are 0. ``transformers`` as it is takes others for rows of other lengths."""
    model = tiny_family(family, tmp_path, index_n_heads=heads)
    executor, _ = serve(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    assert (stepwise(executor, IDS[:15], IDS[15:]) - expected).abs().max() < tolerance(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_under_the_names_of_a_checkpoint_changes_every_weight(tmp_path, family):
    tiny_family(family, tmp_path / "old", seed=0)
    model = tiny_family(family, tmp_path / "new", seed=5)
    executor, weights = serve(tmp_path / "old")
    stored = stored_tensors(family, tmp_path / "new")
    assert weights.named.keys() == stored.keys()
    for pair in stored.items():
        weights.update([pair])
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    assert (stepwise(executor, IDS, []) - expected).abs().max() < tolerance(family)


@pytest.fixture(scope="module")
def glm4(tmp_path_factory):
    path = tmp_path_factory.mktemp("glm4")
    tiny_family("glm4", path)
    return serve(path)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_sequence_is_the_same_to_the_last_bit_in_any_company(tmp_path, family):
    """Alone, and as one of nine that are as long as it, or longer than a span of attention."""
    tiny_family(family, tmp_path)
    executor, _ = serve(tmp_path)
    alone = stepwise(executor, IDS[:9], IDS[9:12])
    lengths = [70, 20, 9, 3, 64, 9, 1, 30]
    others = [[(11 * i + length) % 256 for i in range(length)] for length in lengths]
    together = [executor.prefill([*others, IDS[:9]], 0)[-1, :9]]
    for step, token in enumerate(IDS[9:12]):
        ids = torch.tensor([*range(len(others)), token])
        positions = torch.tensor([*lengths, 9]) + step
        together.append(executor.decode(ids, positions, 0, 71 + step)[-1:])
    assert torch.equal(executor.model.logits(torch.cat(together)), alone)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4", "deepseek_v3", "gpt_oss", "qwen3_5_moe_text"])
def test_no_bit_of_a_response_depends_on_its_company(tmp_path, family):
    """Through the scheduler, which moves rows, copies prompts and cuts long ones into chunks."""
    tiny_family(family, tmp_path)
    flags = {"chunked_prefill_size": 64, "max_running_requests": 5}
    compared = slice(None, None, 3)  # alone; of four kinds of sampling, and one has the prompt of another
    alone, together = mixed_requests(12)[compared], mixed_requests(12)
    for groups in ([[one] for one in alone], [together]):
        scheduler = make_state((tmp_path,), **flags).engine.scheduler
        for group in groups:
            scheduler.waiting.extend(group)
            run_all(scheduler)
    assert [s.output_ids for s in together[compared]] == [s.output_ids for s in alone]
    assert [s.output_logprobs for s in together[compared]] == [s.output_logprobs for s in alone]


def _long_requests(number):
    """Copies of prompts, and responses that end beyond what a cache first has memory for."""
    random_ = random.Random(3)
    prompts = [[random_.randrange(256) for _ in range(length)] for length in (3, 33, 70, 150)]
    lengths = [random_.choice([1, 9, 50]) for _ in range(number)]
    return [sequence("r" * i, prompts[i // 2 % 4], max_new_tokens=new) for i, new in enumerate(lengths)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {"sliding_window": 33}),
        ("gpt_oss", {"sliding_window": 33}),
        ("qwen3_next", {}),
    ],
)
def test_long_responses_have_the_log_probs_of_transformers(tmp_path, family, changes):
    """Through the scheduler: the cache grows, rows move, prompts are copied, some begin anew."""
    model = tiny_family(family, tmp_path, **changes)
    flags = {"chunked_prefill_size": 64, "max_running_requests": 4, "max_total_tokens": 1200}
    scheduler = make_state((tmp_path,), **flags).engine.scheduler
    requests = _long_requests(8)
    scheduler.waiting.extend(requests)
    for step in count():
        scheduler.step(admit=True)
        if not scheduler.live:
            break
        if step in (8, 40):
            scheduler.retract()
    assert any(one.num_retractions for one in requests) and any(one.cached_tokens for one in requests)
    for one in requests:
        ids = torch.tensor([one.prompt_ids + one.output_ids])
        with torch.no_grad():
            found = model(ids).logits[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        expected = found[len(one.prompt_ids) - 1 :]
        gap = (torch.tensor(one.output_logprobs.of_tokens) - expected).abs().max()
        assert gap < 2 * tolerance(family)


@pytest.mark.parametrize(
    "family", ["glm4", "gemma3_text", "deepseek_v3", "gpt_oss", "qwen3_next", "glm_moe_dsa-shared"]
)
def test_a_prompt_in_chunks_and_a_copied_prompt_go_on_as_the_whole_one(tmp_path, family):
    tiny_family(family, tmp_path)
    executor, _ = serve(tmp_path)
    expected = stepwise(executor, IDS[:20], IDS[20:25])
    with torch.inference_mode():
        cache = executor.new_cache(20)
        executor.prefill_chunk(IDS[:8], 0, cache)
        executor.prefill_chunk(IDS[8:20], 8, cache)
        executor.cache.import_row(cache, 1, 20)
        executor.decode(torch.tensor([3]), torch.tensor([20]), 1, 21)  # goes another way than its copy
        executor.cache.copy_row(1, 0, 21)  # takes another one's place
        executor.cache.copy_row(0, 2, 20)
        for position, token in enumerate(IDS[20:25], 20):
            hidden = executor.decode(torch.tensor([token]), torch.tensor([position]), 2, position + 1)
        assert (executor.model.logits(hidden) - expected[-1]).abs().max() < tolerance(family)


@pytest.mark.parametrize("family", ["minimax_m2", "deepseek_v3"])
def test_biases_that_choose_experts_stay_float32(tmp_path, family):
    tiny_family(family, tmp_path)
    _, weights = build_executor(tmp_path, ModelConfig.from_directory(tmp_path, "bfloat16"), LIMITS)
    dtypes = {name: tensor.dtype for name, tensor in weights.named.items() if "correction_bias" in name}
    assert {*dtypes.values()} == {torch.float32} and len(dtypes) >= 3


def test_released_weights_come_back(glm4):
    executor, weights = glm4
    before = stepwise(executor, IDS, [])
    weights.release(keep_backup=True)
    with pytest.raises(BadRequest, match="released"):
        weights.update([])
    weights.resume()
    assert torch.equal(stepwise(executor, IDS, []), before)


def test_a_tensor_without_a_place_is_refused(glm4):
    _, weights = glm4
    with pytest.raises(BadRequest, match="this glm4 model has none of that name"):
        weights.update([("model.layers.0.mlp.up_proj.weight", torch.zeros(96, 64))])
    with pytest.raises(BadRequest, match=r"shape \[3\] .wanted: \[64\]"):
        weights.update([("model.norm.weight", torch.zeros(3))])
