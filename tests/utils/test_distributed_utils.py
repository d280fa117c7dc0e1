from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from slime.ray.train_worker import TrainWorker
from slime.utils.distributed_utils import distributed_masked_whiten, init_process_group, meeting_store
from tests.engines import free_port
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import trainer_args


def _listening() -> list[str]:
    """The addresses at which this process listens."""
    connections = psutil.Process().net_connections("tcp")
    return sorted(
        {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    )


def _train_and_join_another_group(rank, args, port):
    TrainWorker(args).start()
    group = init_process_group("gloo", f"tcp://127.0.0.1:{port}", 2, rank, "weights", timedelta(seconds=60))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return {"total": float(total), "listening": _listening()}


def test_a_trainer_on_one_machine_listens_on_loopback_only(tmp_path):
    args = trainer_args(save_tiny_hf(tmp_path, "qwen3"))
    for result in run_ranks(_train_and_join_another_group, 2, args, free_port()):
        assert result == {"total": 2.0, "listening": ["127.0.0.1"]}


def test_a_meeting_at_an_address_of_another_machine_is_still_served(caplog):
    store = meeting_store("localhost", free_port(), 1, 0, timedelta(seconds=10))
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(dist.DistError), caplog.at_level("WARNING"):
        meeting_store("192.0.2.1", free_port(), 1, 0, timedelta(seconds=1))
    assert "192.0.2.1 is no address of this machine" in caplog.text


def test_whitening_uses_masked_entries_and_the_unbiased_variance():
    values, mask = torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.tensor([1, 1, 1, 0])
    whitened = distributed_masked_whiten(values, mask)
    assert whitened[:3].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)
    assert distributed_masked_whiten(values, mask, shift_mean=False)[1] == pytest.approx(2.0, abs=1e-6)


def test_whitening_equal_values_gives_zeros():
    whitened = distributed_masked_whiten(torch.full((5000,), 0.7), torch.ones(5000))
    assert whitened.abs().max() < 1e-3


def test_whitening_nothing_is_an_error():
    with pytest.raises(ValueError, match="mask is zero"):
        distributed_masked_whiten(torch.ones(2), torch.zeros(2))
