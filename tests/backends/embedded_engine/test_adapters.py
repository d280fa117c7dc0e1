"""Adapters beside the weights: PEFT's numbers, each request with its own, and whose name is whose."""

import asyncio
import hashlib

import peft
import pytest
import torch

from slime.adapters.peft_config import served_config
from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.build import build_server
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import LogprobOptions, Sequence
from slime.config.lora import LoraConfig
from slime.utils.model_inputs import SequenceInputs
from slime.utils.tensor_bucket import FlattenedTensorBucket, serialize_tensors
from tests.engines.embedded import Server, make_checkpoint, token_logprobs
from tests.families import tiny_family

pytestmark = pytest.mark.slow

RANK, ALPHA = 4, 6.0
IDS = [5, 3, 7, 11, 40, 41, 42, 43, 9, 8, 7, 6]


def adapted(model, seed, targets="all-linear"):
    """PEFT's model with an adapter that matters, its tensors, and what engines are told of it."""
    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, lora).eval()
    with torch.no_grad():
        for name, param in wrapped.named_parameters():
            if "lora_B" in name:
                param.normal_(0, 0.3)
    tensors = peft.get_peft_model_state_dict(wrapped)
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    return wrapped, tensors, served_config(LoraConfig(lora_rank=RANK, lora_alpha=ALPHA), modules)


@pytest.fixture(scope="module")
def adapters(checkpoint):
    """Two adapters of all layers, each with PEFT's log-probs of `IDS`."""
    made = {}
    for seed, name in enumerate(("first", "second")):
        model, tensors, config = adapted(checkpoint[1], seed)
        made[name] = tensors, config, token_logprobs(model, IDS)
        model.unload()
    return made


def scored(name=None, new=3):
    options = LogprobOptions(wanted=True, prompt_start=0)
    params = SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True)
    return Sequence(f"{name}{new}", SequenceInputs(IDS), params, options, noise_seed=0, lora_path=name)


def serving(path, **changes):
    args = {"skip_tokenizer_init": True, "enable_lora": True, "max_lora_rank": RANK}
    return build_server(EmbeddedServerArgs(model_path=str(path), **{**args, **changes})).engine.scheduler


def run_all(scheduler, sequences):
    scheduler.enqueue(sequences)
    while scheduler.live:
        scheduler.step(admit=True)
    return [sequence.prompt_logprobs.of_tokens for sequence in sequences]


def test_every_request_is_computed_with_its_own_adapter(checkpoint, adapters):
    scheduler = serving(checkpoint[0])
    for name, (tensors, config, _) in adapters.items():
        scheduler.adapters.load(name, tensors, config)
    names = [None, "first", "second", "first", None]
    sequences = [scored(name, new) for new, name in enumerate(names, 3)]
    found = run_all(scheduler, sequences)
    expected = {name: logprobs for name, (_, _, logprobs) in adapters.items()}
    expected[None] = token_logprobs(checkpoint[1], IDS)
    for name, logprobs in zip(names, found, strict=True):
        assert logprobs[1:] == pytest.approx(expected[name], abs=1e-5), name
    assert expected["first"] != pytest.approx(expected[None], abs=0.1)
    # Alone or in company, to the last bit, in what they say of their own tokens too.
    for sequence, new in zip(sequences, range(3, 8), strict=True):
        alone = scored(sequence.lora_path, new)
        run_all(scheduler, [alone])
        assert alone.prompt_logprobs.of_tokens == sequence.prompt_logprobs.of_tokens
        assert alone.output_logprobs.of_tokens == sequence.output_logprobs.of_tokens


def test_no_prompt_is_taken_from_another_adapter_or_an_earlier_one_of_its_name(checkpoint, adapters):
    scheduler = serving(checkpoint[0])
    tensors, config, _ = adapters["first"]
    scheduler.adapters.load("first", tensors, config)
    asked = lambda name, new: Sequence(
        f"{name}{new}",
        SequenceInputs(IDS),
        SamplingParams(max_new_tokens=new, ignore_eos=True),
        LogprobOptions(),
        noise_seed=0,
        lora_path=name,
    )
    first = asked("first", 30)
    scheduler.enqueue([first])
    scheduler.step(admit=True)
    base, same = asked(None, 2), asked("first", 3)
    scheduler.enqueue([base, same])
    scheduler.step(admit=True)
    scheduler.adapters.unload("first")
    scheduler.adapters.load("first", adapters["second"][0], config)
    renamed = asked("first", 4)
    run_all(scheduler, [renamed])
    assert (base.cached_tokens, same.cached_tokens, renamed.cached_tokens) == (0, len(IDS), 0)
    fresh = serving(checkpoint[0])
    fresh.adapters.load("other", tensors, config)
    again = asked("other", 30)
    run_all(fresh, [again])
    assert again.output_ids == first.output_ids  # with what it began with, to its end


@pytest.mark.parametrize(
    "family", [pytest.param("llama", id="ours"), pytest.param("glm4", id="transformers")]
)
def test_layers_of_each_kind_of_model_have_them(family, tmp_path):
    model = make_checkpoint(tmp_path, family) if family == "llama" else tiny_family(family, tmp_path)
    wrapped, tensors, config = adapted(model.float().eval(), 5)
    scheduler = serving(tmp_path, dtype="float32", chunked_prefill_size=5)
    scheduler.adapters.load("mine", tensors, config)
    found = run_all(scheduler, [scored("mine"), scored()])
    assert found[0][1:] == pytest.approx(token_logprobs(wrapped, IDS), abs=1e-5)
    assert found[1][1:] == pytest.approx(token_logprobs(wrapped.unload(), IDS), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: c.update(r=8), "r 8 (wanted: 1 to 4, --max-lora-rank)"),
        (lambda t, c: c.update(use_dora=True), "says use_dora True, which is not computed here"),
        (lambda t, c: c.pop("r"), "no r and lora_alpha that are numbers"),
        (lambda t, c: t.popitem(), "has no lora_A [4, in] and lora_B [out, 4]"),
        (
            lambda t, c: t.update({next(iter(t)).replace("lora_A", "lora_magnitude_vector"): torch.ones(64)}),
            "has tensors beside those of its layers",
        ),
        (
            lambda t, c: t.update(
                {
                    "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
                    "base_model.model.lm_head.lora_B.weight": torch.zeros(320, 4),
                }
            ),
            "lm_head is no linear layer",
        ),
        (
            lambda t, c: t.update({next(iter(t)): torch.zeros(4, 7)}),
            "is of a layer [64, 7] (wanted: [64, 64])",
        ),
    ],
)
def test_an_adapter_of_another_model_is_refused_by_name(checkpoint, adapters, change, message):
    scheduler = serving(checkpoint[0])
    tensors, config = dict(adapters["first"][0]), dict(adapters["first"][1])
    change(tensors, config)
    with pytest.raises(BadRequest) as refusal:
        scheduler.adapters.load("first", tensors, config)
    assert message in str(refusal.value) and not scheduler.adapters.names


def test_over_http_they_come_and_go_as_with_sglang(checkpoint, adapters):
    """What SGLang 0.5.23 answers to the same requests."""
    server = Server(checkpoint[0], "--enable-lora", "--max-lora-rank", "4")
    tensors, config, expected = adapters["first"]
    sums = {n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in tensors.items()}
    by_value = {"lora_name": "slime", "config_dict": config, "expected_checksums": sums}
    by_value |= {"serialized_named_tensors": [serialize_tensors(dict(tensors), share=False)]}
    score = {"return_logprob": True, "logprob_start_len": 0}
    ask = lambda **more: server.post(
        "/generate", input_ids=IDS, sampling_params={"max_new_tokens": 1}, **score, **more
    )
    logprobs = lambda answer: [row[0] for row in answer.json()["meta_info"]["input_token_logprobs"][1:]]
    try:
        server.wait_ready()
        unknown = ask(lora_path="slime")
        assert unknown.status_code == 400 and "no such adapter" in unknown.json()["error"]["message"]
        loaded = server.post("/load_lora_adapter_from_tensors", **by_value)
        answer = {"rid": None, "http_worker_ipc": None, "success": True, "error_message": ""}
        assert loaded.json() == {**answer, "loaded_adapters": {"slime": "__tensor__"}}
        assert logprobs(ask(lora_path="slime")) == pytest.approx(expected, abs=1e-5)
        assert logprobs(ask()) == pytest.approx(token_logprobs(checkpoint[1], IDS), abs=1e-5)
        assert ask(lora_path=["slime"]).status_code == 400
        chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", **chat, lora_path="slime").status_code == 200
        assert server.post("/v1/chat/completions", **chat, lora_path="nobody").status_code == 400
        again = server.post("/load_lora_adapter_from_tensors", **by_value)
        assert again.status_code == 400 and "loaded already" in again.json()["error_message"]
        assert [card["id"] for card in server.client.get("/v1/models").json()["data"]][1:] == ["slime"]
        # A request that waits behind a pause is computed with the adapter that has the name afterwards.
        server.post("/pause_generation", mode="abort")
        assert server.post("/unload_lora_adapter", lora_name="slime").json() == {
            **answer,
            "loaded_adapters": {},
        }
        asyncio.run(_behind_a_pause(server, adapters["second"], score))
        name = {"lora_name": "nobody"}
        assert server.post("/unload_lora_adapter", **name).status_code == 400
        wrong = {**by_value, "lora_name": "b", "expected_checksums": {**sums, next(iter(sums)): "0"}}
        refused = server.post("/load_lora_adapter_from_tensors", **wrong)
        assert refused.status_code == 400 and "1 tensors are not those" in refused.json()["error_message"]
    finally:
        server.stop()


async def _behind_a_pause(server, adapter, score):
    tensors, config, expected = adapter
    ask = asyncio.to_thread(
        server.post,
        "/generate",
        input_ids=IDS,
        sampling_params={"max_new_tokens": 1},
        lora_path="slime",
        **score,
    )
    waiting = asyncio.create_task(ask)
    await asyncio.sleep(0.2)
    bucket = FlattenedTensorBucket(named_tensors=list(tensors.items()))
    flat = {"flattened_tensor": bucket.flattened_tensor, "metadata": bucket.metadata}
    loaded = server.post(
        "/load_lora_adapter_from_tensors",
        lora_name="slime",
        config_dict=config,
        load_format="flattened_bucket",
        serialized_named_tensors=[serialize_tensors(flat, share=False)],
    )
    assert loaded.status_code == 200 and not waiting.done()
    server.post("/continue_generation")
    rows = (await waiting).json()["meta_info"]["input_token_logprobs"]
    assert [row[0] for row in rows[1:]] == pytest.approx(expected, abs=1e-5)


def test_without_the_option_there_are_none(checkpoint, adapters):
    scheduler = serving(checkpoint[0], enable_lora=False)
    asked = scored("first")
    run_all(scheduler, [asked])
    assert asked.finish_reason["status_code"] == 400 and "--enable-lora" in asked.finish_reason["message"]
    with pytest.raises(ValueError, match="--enable-lora: needs --max-lora-rank"):
        serving(checkpoint[0], max_lora_rank=None)
