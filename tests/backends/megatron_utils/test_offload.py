"""What a sleeping trainer still holds, and that sleeping changes nothing."""

import pytest
import torch

from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


def _tensors(worker):
    state = worker.backend.state
    for chunk in state.model:
        yield from chunk.parameters()
        yield from (buffer.grad_data for buffer in chunk.buffers)
    for part in state.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for values in part.optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _held_bytes(worker):
    return _bytes_of(_tensors(worker))


def _bytes_of(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _train(rank, args, sleeps):
    worker = TrainWorker(args)
    worker.start()
    held = []
    for rollout_id in range(3):
        batch = split(args, random_rollout(256, seed=rollout_id), worker.parallel_config())
        worker.train_shard(rollout_id, batch)[0]
        if sleeps:
            before, weights = _held_bytes(worker), _bytes_of(worker.backend.state.model[0].parameters())
            worker.offload_training_state()
            assert _held_bytes(worker) == weights
            with pytest.raises(RuntimeError, match="train: the optimizer state is offloaded"):
                worker.train_shard(rollout_id, batch)[0]
            worker.sleep()
            worker.sleep()
            held.append((before, _held_bytes(worker)))
            with pytest.raises(RuntimeError, match="update_weights: the weights are offloaded"):
                worker.update_weights()
            worker.wake_up()
            worker.wake_up()
            assert _held_bytes(worker) == before
    weights = {name: p.detach().clone() for name, p in worker.backend.state.model[0].named_parameters()}
    return {"weights": weights, "held": held}


@pytest.mark.parametrize("precision", [{}, {"params_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sleep_frees_everything_and_changes_nothing(checkpoint, precision, world_size):
    args = trainer_args(checkpoint, **precision)
    awake = run_ranks(_train, world_size, args, False)
    slept = run_ranks(_train, world_size, args, True)
    for reference, found in zip(awake, slept, strict=True):
        for before, asleep in found["held"]:
            assert before > 0 and asleep == 0
        for name, weight in reference["weights"].items():
            assert torch.equal(weight, found["weights"][name]), name
