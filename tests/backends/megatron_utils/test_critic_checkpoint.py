"""A critic goes on in its own layout or another, and starts from weights that have no value head."""

import pytest
import torch

from slime.backends.megatron_utils.named_params import named_params
from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import critic_args, random_rollout, split, trainer_args

pytestmark = pytest.mark.slow

TP2 = {"tensor_model_parallel_size": 2}
VPP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
LAYOUTS = {
    "1 process": (1, {}),
    "PP 2": (2, {"pipeline_model_parallel_size": 2}),
    "PP 2 + VPP 2": (2, VPP2),
    "DP 2": (2, {}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture(scope="module")
def rollouts():
    return {i: random_rollout(vocab_size=256, seed=i) for i in range(2)}


def _run(rank, args, role, rollouts, save):
    """Trains on the rollouts that are left, and saves after the first of all."""
    worker = TrainWorker(args, role)
    start = worker.start()
    before = {name: param.detach().clone() for name, param in named_params(worker.backend.state.model)}
    steps = []
    for rollout_id, batch in rollouts.items():
        if rollout_id >= start:
            shard = split(args, batch, worker.parallel_config())
            steps += worker.train_shard(rollout_id, shard)[0].get("train", [])
            if save and rollout_id == 0:
                worker.save_model(0, force_sync=True)
    after = {name: param.detach().clone() for name, param in named_params(worker.backend.state.model)}
    return {"start": start, "steps": steps, "before": before, "after": after}


@pytest.fixture(scope="module")
def of_two_tensor_ranks(checkpoint, rollouts, tmp_path_factory):
    """A critic that TP 2 has trained on both rollouts, and the checkpoint after the first."""
    root = str(tmp_path_factory.mktemp("critic"))
    args = critic_args(checkpoint, critic_save=root, **TP2)
    results = run_ranks(_run, 2, args, "critic", rollouts, True)
    return root, next(result["steps"] for result in results if result["steps"])[2:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_takes_the_next_steps(checkpoint, rollouts, of_two_tensor_ranks, layout):
    root, expected = of_two_tensor_ranks
    world_size, overrides = LAYOUTS[layout]
    args = critic_args(checkpoint, critic_load=root, critic_resumes=True, **overrides)
    results = run_ranks(_run, world_size, args, "critic", rollouts, False)
    assert [result["start"] for result in results] == [1] * world_size
    found = next(result["steps"] for result in results if result["steps"])
    for mine, wanted in zip(found, expected, strict=True):
        assert mine == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_resume_is_bit_exact(checkpoint, rollouts, tmp_path):
    args = critic_args(checkpoint, critic_save=str(tmp_path), critic_load=str(tmp_path), critic_resumes=True)
    (through,) = run_ranks(_run, 1, args, "critic", rollouts, True)
    (resumed,) = run_ranks(_run, 1, args, "critic", rollouts, False)
    assert resumed["start"] == 1 and resumed["steps"] == through["steps"][2:]
    for name, weight in through["after"].items():
        assert torch.equal(weight, resumed["after"][name]), name


def test_virtual_stages_take_the_trunk_of_an_actors_checkpoint(checkpoint, rollouts, tmp_path):
    run_ranks(_run, 1, trainer_args(checkpoint, save=str(tmp_path)), "actor", {0: rollouts[0]}, True)
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    (whole,) = run_ranks(_run, 1, critic_args(checkpoint, critic_load=str(tmp_path)), "critic", {}, False)
    args = critic_args(checkpoint, critic_load=str(tmp_path), **stages)
    parts = [result["before"] for result in run_ranks(_run, 2, args, "critic", {}, False)]
    found = {name: weight for part in parts for name, weight in part.items()}
    assert found.keys() == whole["before"].keys()
    assert all(torch.equal(weight, whole["before"][name]) for name, weight in found.items())


@pytest.mark.parametrize("flag", ["critic_load", "ref_load"])
def test_the_trunk_comes_from_an_actors_checkpoint_and_the_head_is_new(checkpoint, rollouts, tmp_path, flag):
    actor_args = trainer_args(checkpoint, save=str(tmp_path))
    (actor,) = run_ranks(_run, 1, actor_args, "actor", {0: rollouts[0]}, True)
    (new,) = run_ranks(_run, 1, critic_args(checkpoint), "critic", {}, False)
    (critic,) = run_ranks(
        _run, 1, critic_args(checkpoint, **{flag: str(tmp_path)}), "critic", rollouts, False
    )
    assert critic["start"] == 0
    for name, weight in critic["before"].items():
        source = new["before"] if name.startswith("output_layer") else actor["after"]
        assert torch.equal(weight, source[name]), name
    # The optimizer's weights are the loaded ones, not those that it was built with.
    assert all(
        (critic["after"][name] - weight).abs().max() < 0.05 for name, weight in critic["before"].items()
    )


def test_only_the_weights_of_another_runs_critic_are_taken(checkpoint, rollouts, of_two_tensor_ranks):
    root, _ = of_two_tensor_ranks
    (critic,) = run_ranks(_run, 1, critic_args(checkpoint, critic_load=root), "critic", {}, False)
    (new,) = run_ranks(_run, 1, critic_args(checkpoint), "critic", {}, False)
    assert critic["start"] == 0
    assert not torch.equal(critic["before"]["output_layer.weight"], new["before"]["output_layer.weight"])
