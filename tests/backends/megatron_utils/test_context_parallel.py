"""One optimizer step under context parallelism is that of one process: metrics, gradient norm and weights."""

import pytest
import torch
import transformers

from slime.backends.megatron_utils.cp_utils import (
    all_gather_with_cp,
    get_logits_and_tokens_offset_with_cp,
    slice_log_prob_with_cp,
)
from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.ray.train_worker import TrainWorker
from slime.training.parallel import ParallelContext
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

HERE = "tests.backends.megatron_utils.test_context_parallel"
CP = {"context_parallel_size": 2}
SEQUENCE_MIS = {
    **{"use_tis": True, "use_rollout_logprobs": False, "tis_needs_mean": True, "tis_batch_normalize": True},
    **{"tis_function_path": "slime.training.losses.mis.mis_function", "tis_level": "sequence"},
    **{"tis_mode": "truncate", "tis_upper_bound": 2.0, "tis_lower_bound": 0.5},
    **{"use_rs": True, "rs_level": "geometric", "rs_upper_bound": 1.2, "rs_lower_bound": 0.9},
    **{"rs_veto_threshold": 0.3},
}
VARIANTS = {
    "GRPO, dynamic batches, KL in the loss": {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    "micro-batches of 1": {"use_dynamic_batch_size": False},
    "micro-batches of 2": {"use_dynamic_batch_size": False, "micro_batch_size": 2},
    "mean over tokens": {"calculate_per_token_loss": True, "entropy_coef": 0.01},
    "several steps, whitened": {"global_batch_size": 6, "normalize_advantages": True},
    "GSPO, several steps": {"advantage_estimator": "gspo", "global_batch_size": 4},
    "OPSM": {"use_opsm": True, "opsm_delta": 1e-3},
    "sequence-level MIS": SEQUENCE_MIS,
    "sequence-level correction by a plug-in": {
        "use_tis": True,
        "use_rollout_logprobs": False,
        "custom_tis_function_path": f"{HERE}.sequence_weights",
        "tis_function_path": f"{HERE}.sequence_weights",
    },
    "a loss that gathers pieces": {
        "loss_type": "custom_loss",
        "custom_loss_function_path": f"{HERE}.loss_of_pieces",
    },
    "a loss that calls as upstream's do": {
        "loss_type": "custom_loss",
        "custom_loss_function_path": f"{HERE}.loss_as_upstream",
    },
}


def sequence_weights(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **lengths):
    """Weighs sequences as plug-ins for upstream do: they gather, weigh, and cut to the rank's tokens."""
    sizes = list(zip(lengths["total_lengths"], lengths["response_lengths"], strict=True))
    weights, kept = [], []
    for (total, response), train, rollout, mask in zip(
        sizes, train_log_probs, rollout_log_probs, loss_masks, strict=True
    ):
        train, rollout = (all_gather_with_cp(x, total, response) for x in (train, rollout))
        mean = ((train - rollout) * mask).sum() / mask.sum().clamp(min=1)
        weights.append(mean.exp().clamp(max=2.0).expand(response))
        kept.append(mask * int(mean.abs() < 0.4))
    cut = lambda values: [slice_log_prob_with_cp(v, *size) for v, size in zip(values, sizes, strict=True)]
    weight = torch.cat(cut(weights))
    return pg_loss * weight, cut(kept), {"sequence_weight": weight}


def loss_of_pieces(args, batch, logits, sum_of_sample_mean):
    """A loss of a user who takes his rows from the logits himself: the mean log-prob, squared."""
    whole, start = [], 0
    samples = zip(batch["unconcat_tokens"], batch["response_lengths"], batch["segment_lengths"], strict=False)
    for tokens, response, segment in samples:
        total = len(tokens)
        _, chunks, rows, targets = get_logits_and_tokens_offset_with_cp(total, response)
        pieces, here = [], [c[1] - c[0] for c in chunks]
        offsets = [start, start + here[0]]
        for (first, _), (a, b), (c, d), offset in zip(chunks, rows, targets, offsets, strict=True):
            own = logits[0, offset + a - first : offset + b - first] if b else logits[0, :0]
            pieces.append(own.log_softmax(-1).gather(-1, tokens[c:d, None])[:, 0])
        start += segment // ParallelContext.current().cp_size
        whole.append(all_gather_with_cp(torch.cat(pieces), total, response))
    loss = -sum_of_sample_mean(torch.cat([values.sum().expand_as(values) for values in whole]))
    return loss, {"loss": loss}


def loss_as_upstream(args, batch, logits, sum_of_sample_mean):
    """Log-probs and entropies of whole responses, with entropies that are differentiated."""
    lengths = {key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, results = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **lengths)
    loss = -sum_of_sample_mean(torch.cat(results["log_probs"]) + 0.1 * torch.cat(results["entropy"]))
    return loss, {"loss": loss}


NEAR = {"sequence-level MIS", "GSPO, several steps"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3", num_hidden_layers=4)


@pytest.fixture(scope="module")
def rollout():
    """Beside random samples: nothing trained, no response, fewer tokens than chunks, all in one chunk."""
    batch = random_rollout(vocab_size=256, num_samples=8)
    generator = torch.Generator().manual_seed(3)
    for prompt, response, trained in [(9, 6, False), (5, 0, False), (1, 2, True), (30, 3, True)]:
        tokens = torch.randint(256, (prompt + response,), generator=generator).tolist()
        batch["tokens"].append(tokens)
        batch["response_lengths"].append(response)
        batch["loss_masks"].append([int(trained)] * response)
        batch["rollout_log_probs"].append([-5.0] * response)
        batch["rewards"].append(float(torch.randn((), generator=generator)))
    count = len(batch["tokens"])
    batch |= {"raw_reward": list(batch["rewards"]), "truncated": [0] * count}
    batch["sample_indices"] = batch["rollout_ids"] = [*range(count)]
    batch["rollout_mask_sums"] = [sum(mask) for mask in batch["loss_masks"]]
    return batch


@pytest.fixture(scope="module")
def near(checkpoint, rollout):
    """Makes a rollout with log-probs of the engine near the model's, so that few weights are clipped."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    generator, found = torch.Generator().manual_seed(7), []
    for tokens, response in zip(rollout["tokens"], rollout["response_lengths"], strict=True):
        prompt = len(tokens) - response
        with torch.no_grad():
            log_probs = model(input_ids=torch.tensor([tokens])).logits[0, prompt - 1 : -1].log_softmax(-1)
        chosen = log_probs.gather(-1, torch.tensor(tokens[prompt:], dtype=torch.int64)[:, None])[:, 0]
        found.append((chosen + 0.2 * torch.randn(chosen.shape, generator=generator)).tolist())
    return {**rollout, "rollout_log_probs": found}


def _step(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    report = worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    weights = {}
    for bucket in HfWeights(args, worker.backend.state.model).buckets(1 << 30):
        weights.update({name: tensor.clone() for name, tensor in bucket})
    return {"report": report, "weights": weights}


def _trained(args, world_size, rollout):
    results = run_ranks(_step, world_size, args, rollout)
    (report,) = [result["report"] for result in results if result["report"]]
    for result in results[1:]:
        assert all(torch.equal(result["weights"][name], w) for name, w in results[0]["weights"].items())
    return report, results[0]["weights"]


@pytest.fixture(scope="module")
def alone(checkpoint, rollout, near):
    """The arguments of a variant, its rollout, and the step of one process."""
    found = {}

    def of(variant):
        if variant not in found:
            flags = {"use_rollout_logprobs": True, "global_batch_size": 12, **VARIANTS[variant]}
            batch = near if variant in NEAR else rollout
            step = _trained(trainer_args(checkpoint, **flags), 1, batch)
            found[variant] = flags, batch, step
        return found[variant]

    return of


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_take_the_step_of_one(variant, checkpoint, alone):
    _check(variant, 2, CP, checkpoint, alone)


@pytest.mark.parametrize("variant", ["GSPO, several steps", "sequence-level MIS"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_so_do_four(variant, contiguous, checkpoint, alone):
    """Some have no token of the shortest sequences."""
    _check(variant, 4, {"context_parallel_size": 4, "allgather_cp": contiguous}, checkpoint, alone)


@pytest.mark.parametrize("layout", ["PP 2 + VPP 2", "DP 2"])
def test_whole_sequences_in_other_layouts(layout, checkpoint, alone):
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    _check("sequence-level MIS", 2, {"PP 2 + VPP 2": stages, "DP 2": {}}[layout], checkpoint, alone)


def _check(variant, world_size, layout, checkpoint, alone):
    flags, batch, (one, expected) = alone(variant)
    two, weights = _trained(trainer_args(checkpoint, **{**flags, **layout}), world_size, batch)
    assert [*one["train"][0]] == [*two["train"][0]]
    for alone, shared in zip([*one["train"], one["rollout"]], [*two["train"], two["rollout"]], strict=True):
        # Small ones are means of numbers of either sign, each with the rounding errors of its own size.
        assert shared == pytest.approx(alone, rel=1e-5, abs=1e-6, nan_ok=True)
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, expected[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
