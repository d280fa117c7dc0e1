import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from slime.ray.train_worker import TrainWorker
from slime.utils.distributed_utils import distributed_masked_whiten, init_process_group, meeting_store
from tests.engines import free_port
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import trainer_args

ROOT = Path(__file__).parents[2]


def _listening() -> list[str]:
    """The addresses at which this process listens."""
    connections = psutil.Process().net_connections("tcp")
    return sorted(
        {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}
    )


def _train_and_join_another_group(rank, args, port):
    TrainWorker(args).start()
    group = init_process_group("gloo", f"tcp://127.0.0.1:{port}", 2, rank, "weights", timedelta(seconds=300))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return {"total": float(total), "listening": _listening()}


def test_a_trainer_on_one_machine_listens_on_loopback_only(tmp_path):
    args = trainer_args(save_tiny_hf(tmp_path, "qwen3"))
    for result in run_ranks(_train_and_join_another_group, 2, args, free_port()):
        assert result == {"total": 2.0, "listening": ["127.0.0.1"]}


def _threads_of_further_groups(rank, args, number):
    TrainWorker(args).start()
    before, timeout = len(os.listdir("/proc/self/task")), timedelta(seconds=77)
    groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(number)]
    total = torch.ones(1)
    for group in groups:
        dist.all_reduce(total, group=group)
    limits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    threads = len(os.listdir("/proc/self/task")) - before
    return {"total": float(total), "threads": threads, "timeout": limits == {timeout}}


def test_further_gloo_groups_of_a_trainer_bring_no_thread_that_wakes_all_the_time(tmp_path):
    """Two threads each run their collectives; a third would look for what has come."""
    args = trainer_args(save_tiny_hf(tmp_path, "qwen3"))
    for result in run_ranks(_threads_of_further_groups, 2, args, 5):
        assert result == {"total": 2.0**5, "threads": 2 * 5, "timeout": True}


def test_a_meeting_at_an_address_of_another_machine_is_still_served(caplog):
    store = meeting_store("localhost", free_port(), 1, 0, timedelta(seconds=120))
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(dist.DistError), caplog.at_level("WARNING"):
        meeting_store("192.0.2.1", free_port(), 1, 0, timedelta(seconds=1))
    assert "192.0.2.1 is not an address of this machine" in caplog.text


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


VALUES = [[1.0, 2.0, 50.0], [8.0, -3.0], [4.0, 7.0, 5.0]]
MASKS = [[1, 1, 0], [0, 0], [1, 1, 1]]


def _whiten(rank, members):
    """Whitening over some of three ranks, and over all."""
    dist.init_process_group("gloo", rank=rank, world_size=len(VALUES))
    group = dist.new_group(members)
    values, mask = torch.tensor(VALUES[rank]), torch.tensor(MASKS[rank])
    of_all = distributed_masked_whiten(values, mask)
    of_some = distributed_masked_whiten(values, mask, process_group=group) if rank in members else values
    return {"all": of_all, "some": of_some}


def test_ranks_are_whitened_by_the_entries_of_all_ranks_of_the_group():
    members = [1, 2]
    results = run_ranks(_whiten, 3, members)
    for name, ranks in (("all", [0, 1, 2]), ("some", members)):
        together = distributed_masked_whiten(
            torch.tensor([value for rank in ranks for value in VALUES[rank]]),
            torch.tensor([entry for rank in ranks for entry in MASKS[rank]]),
        )
        torch.testing.assert_close(torch.cat([results[rank][name] for rank in ranks]), together)
    assert not torch.equal(results[2]["all"], results[2]["some"])


def _whiten_nothing(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        distributed_masked_whiten(torch.ones(2), torch.zeros(2))
    except ValueError as error:
        return str(error)
    return None


def test_every_rank_is_told_that_no_rank_has_a_trained_entry():
    assert run_ranks(_whiten_nothing, 2) == ["whitening: the loss mask is zero on every rank"] * 2


def _two_groups(rank, ports):
    """Sums in two groups that span the same processes, beside no default group."""
    addresses = {name: f"tcp://127.0.0.1:{port}" for name, port in ports.items()}
    groups = {name: init_process_group("gloo", url, 2, rank, name) for name, url in addresses.items()}
    sums = []
    for weight, group in enumerate(groups.values(), start=1):
        tensor = torch.tensor([float(weight * (rank + 1))])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    return [sums, [group.rank() for group in groups.values()], dist.is_initialized()]


def test_groups_of_processes_that_share_no_default_group():
    ports = {"weights-a": free_port(), "weights-b": free_port()}
    assert run_ranks(_two_groups, 2, ports) == [[[3.0, 6.0], [rank, rank], False] for rank in range(2)]


_JOIN = """
import torch
import torch.distributed as dist
from slime.utils.distributed_utils import join_process_group

join_process_group(10)
sum_of_ranks = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(sum_of_ranks)
print(f"{sum_of_ranks.item()} of {dist.get_world_size()}")
dist.destroy_process_group()  # else gloo's threads may outlive the interpreter, which aborts
"""


@pytest.mark.slow
def test_ranks_that_torchrun_started_meet_in_its_store(tmp_path):
    script = tmp_path / "join.py"
    script.write_text(_JOIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert run.stdout.count("3 of 2") == 2  # the two may write into one line
