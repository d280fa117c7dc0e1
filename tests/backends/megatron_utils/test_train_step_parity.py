"""One optimizer step is the same in every parallel layout, and in plain transformers with torch's AdamW."""

import pytest
import torch
import transformers

from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import split, trainer_args
from tests.transformers_step import noisy_rollout, transformers_step

pytestmark = pytest.mark.slow

VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}
LAYOUTS = {
    "1 process": (1, {}),
    "TP 2": (2, {"tensor_model_parallel_size": 2}),
    "TP 2 + SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP 2": (2, {"pipeline_model_parallel_size": 2}),
    "PP 3, layers 1 + 2 + 1": (
        3,
        {
            **{"pipeline_model_parallel_size": 3, "account_for_embedding_in_pipeline_split": True},
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    "PP 2, layers 1 + 3": (2, {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}),
    "PP 2 + VPP 2": (2, VPP2),
    "PP 2 + VPP 2, micro-batches of 2": (2, {**VPP2, "use_dynamic_batch_size": False, "micro_batch_size": 2}),
    "PP 2 + VPP 2 overlapped": (2, {**VPP2, **OVERLAP}),
    "PP 2 + VPP 2 x CP 2": (4, {**VPP2, "context_parallel_size": 2}),
    "DP 2": (2, {}),
    "CP 2": (2, {"context_parallel_size": 2}),
    "CP 2 contiguous": (2, {"context_parallel_size": 2, "allgather_cp": True}),
    "CP 2 + recomputation": (
        2,
        {
            **{"context_parallel_size": 2, "recompute_granularity": "full", "recompute_method": "uniform"},
            **{"recompute_num_layers": 1, "recompute_loss_function": True, "log_probs_chunk_size": 8},
        },
    ),
    "TP 2 + SP x CP 2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
    ),
    "CP 2 overlapped": (2, {"context_parallel_size": 2, **OVERLAP}),
    "PP 2 x CP 2": (4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
    "DP 2 x CP 2": (4, {"context_parallel_size": 2}),
    "DP 2 overlapped": (2, OVERLAP),
}
# Old log-probs that differ from the new ones, so that ratios and clipping matter.
LOSS = {"use_rollout_logprobs": True, "entropy_coef": 0.01}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollout(checkpoint):
    return noisy_rollout(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint, rollout):
    return _transformers_step(checkpoint, rollout)


def _transformers_step(checkpoint, rollout):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return {**transformers_step(model, rollout), "weights": model.state_dict()}


def _megatron_step(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    report = worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    weights = {}
    for bucket in HfWeights(args, worker.backend.state.model).buckets(1 << 30):
        weights.update({name: tensor.clone() for name, tensor in bucket})
    return {"report": report, "weights": weights}


@pytest.fixture(scope="module")
def alone(checkpoint, rollout):
    (result,) = run_ranks(_megatron_step, 1, trainer_args(checkpoint, **LOSS), rollout)
    return result["report"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_step_agrees_with_transformers(layout, checkpoint, rollout, reference, alone):
    world_size, overrides = LAYOUTS[layout]
    args = trainer_args(checkpoint, **LOSS, **overrides)
    results = run_ranks(_megatron_step, world_size, args, rollout)
    (report,) = [result["report"] for result in results if result["report"]]
    (step,) = report["train"]
    assert step["train/loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    assert step["train/pg_clipfrac"] > 0
    assert step == pytest.approx(alone["train"][0], rel=1e-5, abs=1e-7)
    assert report["rollout"] == pytest.approx(alone["rollout"], rel=1e-5)
    for result in results:
        for name, weight in result["weights"].items():
            expected = reference["weights"][name]
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
