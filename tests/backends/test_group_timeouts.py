"""How long the collectives of a trainer wait for a peer: as long as the flag says, in each of its groups."""

import pytest
import torch
import torch.distributed as dist

from slime.ray.train_worker import TrainWorker
from tests.backends.fsdp_harness import fsdp_args
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import trainer_args

_MINUTES = 7


def _timeouts(rank, args):
    """Seconds that each group of a started trainer waits."""
    worker = TrainWorker(args)
    worker.start()
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (fsdp_args, {"context_parallel_size": 2}),
        (trainer_args, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    ],
    ids=["fsdp", "megatron"],
)
def test_every_group_of_a_trainer_waits_as_long_as_the_flag_says(make, layout, tmp_path):
    args = make(
        save_tiny_hf(tmp_path, "qwen3"),
        distributed_timeout_minutes=_MINUTES,
        save=str(tmp_path / "save"),
        **layout,
    )
    for timeouts in run_ranks(_timeouts, 4, args):
        assert len(timeouts) > 3
        assert set(timeouts) == {60.0 * _MINUTES}
