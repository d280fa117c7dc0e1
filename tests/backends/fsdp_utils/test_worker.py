"""Memory, freezing, damaged numbers, resets: what the worker does besides steps."""

import pytest
import torch

from slime.backends.fsdp_utils.optimizer import local
from slime.ray.session import cause
from slime.ray.train_worker import TrainWorker
from tests.backends.fsdp_harness import fsdp_args, train, weights_of
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


def _held(tensors):
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _trained(rank, args, sleeps):
    """Three rollouts; with sleep in between, which leaves nothing, and lets nothing be used."""
    worker = TrainWorker(args)
    worker.start()
    state = worker.backend.state
    for rollout_id in range(3):
        shard = split(args, random_rollout(256, seed=rollout_id), worker.parallel_config())
        worker.train_shard(rollout_id, shard)
        if sleeps:
            moments = [value for values in state.optimizer.state.values() for value in values.values()]
            weights = [*state.model.parameters()]
            worker.offload_training_state()
            assert (_held(moments), _held(weights) > 0) == (0, True)
            assert weights_of(worker)
            with pytest.raises(RuntimeError, match="train: the optimizer state is offloaded"):
                worker.train_shard(rollout_id, shard)
            worker.sleep()
            assert (_held(moments), _held(weights)) == (0, 0)
            with pytest.raises(RuntimeError, match="update_weights: the weights are offloaded"):
                worker.update_weights()
            worker.wake_up()
    return weights_of(worker)


def test_sleeping_leaves_nothing_and_changes_nothing_nor_do_recordings(checkpoint, tmp_path):
    extra = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    recorded = {"save_debug_train_data": f"{tmp_path}/{{rollout_id}}.pt", "save_debug_log_probs": True}
    through = run_ranks(_trained, 2, fsdp_args(checkpoint, **extra), False)
    slept = run_ranks(_trained, 2, fsdp_args(checkpoint, **extra, **recorded), True)
    for before, after in zip(through, slept, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    for rollout_id in range(3):
        for shard in torch.load(tmp_path / f"{rollout_id}.pt", weights_only=True)["shards"]:
            assert len(shard["before_log_probs"]) == len(shard["after_log_probs"]) == len(shard["tokens"])
            for values in zip(shard["before_log_probs"], shard["after_log_probs"], strict=True):
                assert not torch.equal(*values)


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        ({"freeze_params_name_list": ["embed", r"layers\.[0-2]\."]}, ("layers.3", "model.norm")),
        ({"only_train_params_name_list": ["q_proj"]}, ("q_proj",)),
    ],
)
def test_frozen_parameters_stay(checkpoint, flags, trained):
    args = fsdp_args(checkpoint, weight_decay=0.1, **flags)
    before = run_ranks(train, 1, args, [])[0]["weights"]
    after = run_ranks(train, 2, args, [random_rollout(256)])[0]["weights"]
    for name, weight in before.items():
        moves = any(part in name for part in trained)
        assert torch.equal(weight, after[name]) is not moves, name


def _refusal(rank, args):
    try:
        TrainWorker(args).start()
    except ValueError as error:
        return str(error)


def test_freezing_that_matches_nothing_or_everything_is_refused(checkpoint):
    (line,) = run_ranks(_refusal, 1, fsdp_args(checkpoint, freeze_params_name_list=["nothing"]))
    assert line.startswith("--freeze-params-name-list 'nothing': matches no parameter")
    (line,) = run_ranks(_refusal, 1, fsdp_args(checkpoint, freeze_params_name_list=["."]))
    assert line.endswith("leaves no parameter to train")


def _first_lines(rank, args, value):
    """Returns the first lines of errors of a save, a sync and a step, with one value of a rank damaged."""
    worker = TrainWorker(args)
    worker.start()
    if rank == 0:
        weight = worker.backend.state.model.get_parameter("model.layers.1.mlp.up_proj.weight")
        local(weight).view(-1)[0] = value
    shard = split(args, random_rollout(256), worker.parallel_config())
    lines = []
    actions = [lambda: worker.train_shard(0, shard)]
    if rank == 0:
        actions += [lambda: worker.save_model(3), worker.update_weights]
    for action in actions:
        try:
            action()
        except RuntimeError as error:
            lines.append(cause(error))
    return lines


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_damaged_weights_are_neither_saved_nor_sent_nor_trained(checkpoint, tmp_path, value):
    args = fsdp_args(checkpoint, save=str(tmp_path / "saved"))
    (step, save, sync), (other,) = run_ranks(_first_lines, 2, args, value)
    assert step.startswith(
        "the gradients hold NaN or infinity; so do the weights, first model.layers.1.mlp.up"
    )
    assert other.startswith("the gradients hold NaN or infinity; the weights do not")
    assert save.startswith(
        "saving rollout 3: the weights hold NaN or infinity, first in model.layers.1.mlp.up"
    )
    assert sync.startswith("giving the engines the weights: the weights hold NaN or infinity")
    assert not list(tmp_path.glob("saved/iter*"))


def _moments(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    worker.train_shard(0, split(args, rollout, worker.parallel_config()))
    worker.backend.reset_optimizer()
    states = worker.backend.state.optimizer.state.values()
    return [float(local(value).abs().sum()) for state in states for value in state.values()]


def test_a_reset_forgets_moments_and_steps(checkpoint):
    (sums,) = run_ranks(_moments, 1, fsdp_args(checkpoint), random_rollout(256))
    assert sums and set(sums) == {0.0}
