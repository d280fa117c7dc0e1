"""Which steps are skipped, and that those that are not have the gradients of every weight right."""

import pytest
import torch

from slime.ray.train_worker import TrainWorker
from tests.backends.fsdp_harness import fsdp_args, weights_of
from tests.families import tiny_family
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

SFT = dict(loss_type="sft_loss", compute_advantages_and_returns=False, optimizer="sgd", sgd_momentum=0.0)
ROUTER = dict(moe_router_load_balancing_type=["none"], moe_aux_loss_coeff=[0.0], moe_z_loss_coeff=None)
SEARCH = dict(initial_loss_scale=2.0**22, min_loss_scale=1.0, loss_scale_window=1000, hysteresis=1)
HALF = dict(params_dtype=torch.float16, fp16=True, loss_scale=None, **SEARCH)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3", hidden_size=32, num_hidden_layers=2)


def _norms(rank, args, rollout):
    """Returns each optimizer's gradient norms in the first step that is not skipped, and how many were."""
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, rollout, worker.parallel_config())
    for rollout_id in range(12):
        (step,) = worker.train_shard(rollout_id, shard)[0]["train"]
        if not step.get("train/skipped"):
            parts = worker.backend.state.optimizer.chained_optimizers
            return {"skipped": rollout_id, "norms": [float(part.get_grad_norm()) for part in parts]}
    return None


def test_experts_have_the_loss_scale_of_the_other_weights(tmp_path):
    path = save_tiny_hf(tmp_path, "qwen3_moe", hidden_size=32, num_hidden_layers=2)
    flags = dict(**SFT, **ROUTER, moe_token_dispatcher_type="alltoall", lr=0.0, clip_grad=0.0)
    results = [
        run_ranks(_norms, 1, trainer_args(path, **flags, **precision), random_rollout(256))[0]
        for precision in ({}, HALF)
    ]
    single, half = (result["norms"] for result in results)
    assert len(single) == 2 and results[1]["skipped"] > 2
    assert half == pytest.approx(single, rel=0.02)


def _sometimes_nan(args, batch, logits, sum_of_sample_mean):
    factor = float("nan") if max(batch["rewards"]) > 50 else 0.01
    loss = logits.square().mean() * factor
    return loss, {"loss": loss.detach()}


def _train(rank, args, rollouts):
    worker = TrainWorker(args)
    worker.start()
    steps, weights = [], [weights_of(worker)]
    for rollout_id, rollout in enumerate(rollouts):
        shard = split(args, rollout, worker.parallel_config())
        steps += worker.train_shard(rollout_id, shard)[0].get("train", [])
        weights.append(weights_of(worker))
    return {"steps": steps, "weights": weights}


def _with_biases(path, **options):
    """Returns the arguments of a model whose biases of experts move."""
    tiny_family("glm4_moe", path)
    return trainer_args(path, **ROUTER, moe_router_bias_update_rate=0.1, **options)


@pytest.mark.parametrize("make_args", [trainer_args, fsdp_args, _with_biases])
def test_a_step_with_nan_is_skipped_where_it_is_not_to_end_the_run(make_args, checkpoint, tmp_path):
    good = [random_rollout(256, seed=seed) for seed in range(2)]
    bad = random_rollout(256, seed=2)
    bad["rewards"][3] = 99.0  # on one of the ranks
    args = make_args(
        tmp_path if make_args is _with_biases else checkpoint,
        loss_type="custom_loss",
        custom_loss_function_path=f"{__name__}.{_sometimes_nan.__name__}",
        no_check_for_nan_in_loss_and_grad=True,
        lr_decay_style="linear",
    )
    results = run_ranks(_train, 2, args, [good[0], bad, good[1]])
    (steps,) = [result["steps"] for result in results if result["steps"]]
    assert [step["train/skipped"] for step in steps] == [0, 1, 0]
    assert "train/grad_norm" not in steps[1] and steps[2]["train/grad_norm"] > 0
    assert steps[2]["train/lr-pg_0"] == steps[1]["train/lr-pg_0"] < steps[0]["train/lr-pg_0"]
    start, first, second, third = results[0]["weights"]
    biases = [name for name in start if name.endswith("e_score_correction_bias")]
    assert bool(biases) == (make_args is _with_biases)
    assert not any(torch.equal(start[name], first[name]) for name in biases)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert all(torch.isfinite(weight).all() for weight in third.values())
    assert any(not torch.equal(weight, third[name]) for name, weight in first.items())
