"""Adapters train as PEFT trains them, in every parallel layout."""

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from slime.ray.train_worker import TrainWorker
from slime.training.weights import ADAPTER
from tests.backends.lora_reference import (
    ALPHA,
    EPS,
    FLAGS,
    KL,
    RANK,
    base_model,
    expect_close,
    merged_by_hand,
    peft_step,
    save_random,
    tensors_of,
)
from tests.families import tiny_family
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args
from tests.transformers_step import noisy_rollout, transformers_step

pytestmark = pytest.mark.slow

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LAYOUTS = {
    "1 process": (1, {}),
    "TP 2": (2, TP2),
    "TP 2 + SP, recomputed": (
        2,
        {
            **{**TP2, "sequence_parallel": True, "recompute_granularity": "full"},
            **{"recompute_method": "uniform", "recompute_num_layers": 1},
        },
    ),
    "PP 2 + VPP 2": (2, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    "CP 2": (2, {"context_parallel_size": 2}),
    "DP 2": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 4000}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    """Saves an adapter of PEFT's own that changes the model."""
    return save_random(checkpoint, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def rollout(checkpoint):
    return noisy_rollout(checkpoint)


def _step(rank, args, rollout, target):
    """One step from the adapter of the flags; what is sent to engines and exported after it."""
    worker = TrainWorker(args)
    worker.start()
    backend = worker.backend
    chunks = backend.state.model
    report = worker.train_shard(0, split(args, rollout, worker.parallel_config()))[0]
    backend.save_hf(target)
    return {
        "report": report,
        "adapter": tensors_of(backend.weights(ADAPTER)),
        "merged": tensors_of(backend.weights()),
        "gradients": sum(buffer.grad_data.numel() for chunk in chunks for buffer in chunk.buffers),
        "copies": sum(
            t.numel() for tag in backend.versions.backup_tags for t in backend.versions.get(tag).values()
        ),
    }


@pytest.fixture(scope="module")
def reference(checkpoint, adapter, rollout):
    return peft_step(checkpoint, adapter, rollout)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if LAYOUTS[name][0] > 1 else ()) for name in LAYOUTS]
)
def test_one_step_agrees_with_peft(layout, checkpoint, adapter, rollout, reference, tmp_path):
    world_size, overrides = LAYOUTS[layout]
    args = trainer_args(checkpoint, lora_adapter_path=adapter, **{**FLAGS, **overrides})
    results = run_ranks(_step, world_size, args, rollout, str(tmp_path / "out"))
    (report,) = [result["report"] for result in results if result["report"]]
    (step,) = report["train"]
    assert step["train/loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    size = sum(tensor.numel() for tensor in reference["adapter"].values())
    model = sum(tensor.numel() for tensor in base_model(checkpoint).parameters())
    for result in results:
        for form in ("adapter", "merged"):
            expect_close(result[form], reference[form])
        # Nothing of the base has gradients, or is copied for the reference.
        assert 0 < result["gradients"] < 1.2 * size + 1000 < model / 4
        assert 0 < result["copies"] <= 2 * size
    exported = load_file(tmp_path / "out" / "adapter_model.safetensors")
    expect_close(exported, reference["adapter"])


def _kl_of_first_steps(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    reports = [worker.train_shard(i, split(args, rollout, worker.parallel_config()))[0] for i in range(3)]
    return [report["train"][0]["train/ppo_kl"] for report in reports]


def test_log_probs_before_training_are_those_of_training_bit_for_bit(checkpoint):
    """By the same products of matrices, once the adapter adds something."""
    flags = {"ci_test": True, "ci_train_rollout_logprob_abs_diff_threshold": 100.0, "lr": 0.01}
    args = trainer_args(checkpoint, lora_rank=RANK, lora_alpha=ALPHA, **flags)
    (found,) = run_ranks(_kl_of_first_steps, 1, args, random_rollout(256, num_samples=32, seed=5))
    assert found == [0, 0, 0]


def _rounded(rank, args):
    worker = TrainWorker(args)
    worker.start()
    weights = worker.backend.weights()
    merged = tensors_of(weights)
    return {
        "merged": merged,
        "adapter": tensors_of(worker.backend.weights(ADAPTER)),
        "lost": weights.rounding,
    }


@pytest.mark.slow
def test_what_rounding_takes_from_merged_weights_is_told(checkpoint, adapter):
    args = trainer_args(
        checkpoint, lora_adapter_path=adapter, **FLAGS, params_dtype=torch.bfloat16, bf16=True
    )
    (found,) = run_ranks(_rounded, 1, args)
    base = base_model(checkpoint).bfloat16().state_dict()
    wanted, more = merged_by_hand(base, found["adapter"], ALPHA / RANK, torch.bfloat16)
    lost, added = 0.0, 0.0
    for weight, whole in wanted.items():
        assert torch.equal(found["merged"][weight], whole), weight
        exact = base[weight].float() + more[weight]
        lost, added = lost + (whole - exact).square().sum(), added + more[weight].square().sum()
    assert 0 < found["lost"] < 0.1 and found["lost"] == pytest.approx(float((lost / added) ** 0.5), rel=1e-3)


def _start(rank, args, target):
    worker = TrainWorker(args)
    worker.start()
    worker.backend.save_hf(target)
    return {
        "adapter": tensors_of(worker.backend.weights(ADAPTER)),
        "merged": tensors_of(worker.backend.weights()),
        "log_probs": worker.text_log_probs([5, 3, 7, 11]),
    }


@pytest.mark.slow
def test_an_adapter_begins_as_the_base_and_alike_in_every_layout(checkpoint, tmp_path):
    flags = dict(lora_rank=RANK, lora_target_modules=["q_proj", "v_proj", "mlp.down_proj"])
    flags |= dict(lora_exclude_modules=[r".*layers\.0\..*"], lora_use_rslora=True)
    (alone,) = run_ranks(_start, 1, trainer_args(checkpoint, **flags), str(tmp_path / "one"))
    split_up = run_ranks(_start, 2, trainer_args(checkpoint, **flags, **TP2), str(tmp_path / "two"))[0]
    base = base_model(checkpoint).state_dict()
    for name, tensor in alone["merged"].items():
        assert torch.equal(tensor, base[name]), name
    assert len(alone["adapter"]) == 3 * 3 * 2  # layers, projections, A and B
    for name, tensor in alone["adapter"].items():
        assert torch.equal(tensor, split_up["adapter"][name]), name
        assert tensor.any() == ("lora_A" in name) and tensor.abs().max() < tensor.size(1) ** -0.5
    loaded = peft.PeftModel.from_pretrained(base_model(checkpoint), tmp_path / "two")
    state = peft.get_peft_model_state_dict(loaded)
    assert state.keys() == alone["adapter"].keys()
    config = json.loads(Path(tmp_path, "two", "adapter_config.json").read_text())
    assert config["use_rslora"] and config["r"] == RANK and len(config["target_modules"]) == 9


EXPERTS = {
    **{"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]},
    **{"moe_token_dispatcher_type": "alltoall", "moe_router_bias_update_rate": 0.0},
}
ATTENTION = [f"{part}_proj" for part in ("q", "k", "v", "o")]
TARGETS = {
    "qwen2_moe": [*ATTENTION, "shared_expert.gate_proj", "shared_expert.down_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
FAMILY_LAYOUTS = {
    "qwen2_moe": {**TP2, "sequence_parallel": True},
    "deepseek_v3": {
        **{**TP2, "sequence_parallel": True},
        **{"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", TARGETS)
def test_layers_beside_experts_agree_with_peft(family, tmp_path):
    """Shared experts, and projections that no rank has a part of."""
    base, adapter = tmp_path / "base", str(tmp_path / "adapter")
    tiny_family(family, base)
    rollout = noisy_rollout(base)
    save_random(base, adapter, target_modules=TARGETS[family])
    model = peft.PeftModel.from_pretrained(base_model(base), adapter, is_trainable=True)
    reference = transformers_step(model, rollout, EPS, KL, model.disable_adapter)
    flags = FLAGS | EXPERTS | FAMILY_LAYOUTS[family]
    args = trainer_args(base, lora_adapter_path=adapter, lora_target_modules=TARGETS[family], **flags)
    results = run_ranks(_step, 2, args, rollout, str(tmp_path / "out"))
    (report,) = [result["report"] for result in results if result["report"]]
    (step,) = report["train"]
    assert step["train/loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert step["train/grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    expect_close(results[0]["adapter"], peft.get_peft_model_state_dict(model))
    # Experts have last names that targets have, too.
    again = peft.PeftModel.from_pretrained(base_model(base), tmp_path / "out")
    expect_close(peft.get_peft_model_state_dict(again), results[0]["adapter"])
