"""float16: the loss scale moves as megatron-core's does, and steps that overflow are skipped."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from slime.backends.fsdp_utils.loss_scale import LossScale
from slime.config.precision import PrecisionConfig
from slime.ray.train_worker import TrainWorker
from tests.backends.fsdp_harness import fsdp_args, train, weights_of
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

SEARCH = dict(initial_loss_scale=2.0**10, min_loss_scale=1.0, loss_scale_window=2, hysteresis=1)
HALF = dict(params_dtype=torch.float16, fp16=True, loss_scale=None, **SEARCH)
ADAPTERS = dict(lora_rank=4, global_batch_size=4)
OVERFLOWS = {**HALF, "initial_loss_scale": 2.0**40, "hysteresis": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollouts():
    return [random_rollout(256, seed=seed) for seed in range(3)]


def _of_megatron(config):
    """Makes Megatron's scaler without its constructor, which wants CUDA."""
    scaler = DynamicGradScaler.__new__(DynamicGradScaler)
    vars(scaler).update(
        _scale=torch.tensor([config.initial_loss_scale]),
        min_scale=torch.tensor([config.min_loss_scale]),
        growth_factor=torch.tensor([2.0]),
        backoff_factor=torch.tensor([0.5]),
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
        _growth_tracker=0,
        _hysteresis_tracker=config.hysteresis,
    )
    return scaler


@given(
    overflows=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    smallest=st.sampled_from([1.0, 256.0]),
)
def test_the_scale_moves_as_that_of_megatron(overflows, window, hysteresis, smallest):
    config = PrecisionConfig(
        initial_loss_scale=2.0**10,
        min_loss_scale=smallest,
        loss_scale_window=window,
        hysteresis=hysteresis,
    )
    ours, wanted = LossScale(config), _of_megatron(config)
    for overflow in overflows:
        ours.update(overflow)
        wanted.update(overflow)
        assert ours.factor == wanted.scale.item()


def test_a_fixed_scale_stays():
    fixed = LossScale(PrecisionConfig(loss_scale=8.0, hysteresis=1))
    for overflow in (True, False):
        fixed.update(overflow)
    fixed.load_state_dict({"factor": 2.0, "good_steps": 1, "tolerated": 1})
    assert fixed.factor == 8.0


@pytest.mark.parametrize(
    "batches", [{}, {"calculate_per_token_loss": True, "global_batch_size": 4}, {**ADAPTERS, "lr": 0.01}]
)
def test_steps_are_those_of_megatron(batches, checkpoint, rollouts):
    (wanted,) = run_ranks(train, 1, trainer_args(checkpoint, **HALF, **batches), rollouts[:1])
    found = run_ranks(train, 2, fsdp_args(checkpoint, **HALF, **batches), rollouts[:1])[0]
    assert {weight.dtype for weight in found["weights"].values()} == {torch.float16}
    for step, wanted_step in zip(found["reports"][0][0], wanted["reports"][0][0], strict=True):
        assert step.keys() == wanted_step.keys() and step["train/skipped"] == 0
        assert step["train/loss"] == pytest.approx(wanted_step["train/loss"], rel=0.02, abs=0.01)
        assert step["train/grad_norm"] == pytest.approx(wanted_step["train/grad_norm"], rel=0.02)


def _run(rank, args, rollouts, save_after):
    worker = TrainWorker(args)
    start = worker.start()
    before, steps, scales = weights_of(worker), [], []
    for rollout_id in range(start, len(rollouts)):
        shard = split(args, rollouts[rollout_id], worker.parallel_config())
        steps += worker.train_shard(rollout_id, shard)[0].get("train", [])
        scales.append(worker.backend.state.loss_scale.state_dict())
        if rollout_id == save_after:
            worker.save_model(rollout_id, force_sync=True)
    result = {"steps": steps, "scales": scales, "before": before, "after": weights_of(worker)}
    return {**result, "samples": worker.backend.state.scheduler.num_steps}


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4}])
def test_a_step_that_overflows_on_one_rank_changes_nothing_on_any(adapters, checkpoint, rollouts):
    rollout = {**rollouts[0], "rewards": [1e30, *rollouts[0]["rewards"][1:]]}
    results = run_ranks(_run, 2, fsdp_args(checkpoint, **HALF, **adapters), [rollout], -1)
    for result in results:
        assert result["scales"] == [{"factor": 2.0**9, "good_steps": 0, "tolerated": 0}]
        assert result["samples"] == 0
        assert all(torch.equal(w, result["after"][name]) for name, w in result["before"].items())
    (step,) = results[0]["steps"]
    assert step["train/skipped"] == 1 and "train/grad_norm" not in step


@pytest.mark.parametrize("adapters", [{}, {"lora_rank": 4}])
def test_a_resume_goes_on_with_the_scale_that_was_found(adapters, checkpoint, rollouts, tmp_path):
    args = fsdp_args(checkpoint, save=str(tmp_path), load=str(tmp_path), **OVERFLOWS, **adapters)
    through = run_ranks(_run, 2, args, rollouts, 0)
    resumed = run_ranks(_run, 2, args, rollouts, -1)
    for before, after in zip(through, resumed, strict=True):
        # The second overflow in a row, one before and one after the save, halves it.
        assert [scale["factor"] for scale in before["scales"]] == [2.0**40, 2.0**39, 2.0**38]
        assert after["scales"] == before["scales"][1:] and after["steps"] == before["steps"][1:]
