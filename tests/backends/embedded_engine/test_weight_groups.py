"""Who may join a group that weights come over, and what receiving them waits for."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from slime.backends.embedded_engine import weight_groups
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.weight_groups import WeightGroups
from slime.utils.distributed_utils import join_again
from tests.each import hold_each

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
REFUSED = [
    (CPU, (0, 2, "g", "gloo"), r"rank_offset 0: wanted 1 to world_size - tp_size = 1"),
    (CPU, (2, 2, "g", "gloo"), r"rank_offset 2: wanted 1 to world_size - tp_size = 1"),
    (CPU, (1, 2, "g", "nccl"), r"backend 'nccl': not supported .* on cpu \(wanted: 'gloo'\)"),
    (CUDA, (1, 2, "g", "mpi"), r"backend 'mpi': .* on cuda:1 \(wanted: 'gloo' or 'nccl'\)"),
    (CPU, (1, 2, "taken", "gloo"), r"group 'taken' exists already \(wanted: another name\)"),
    (CPU, (1, 2, "joining", "gloo"), "group 'joining' is being joined already"),
    (CPU, (1, 2, "lonely", "gloo"), "cannot join group 'lonely' at 10.0.0.1:9: nobody there"),
]


@pytest.fixture
def asked(monkeypatch):
    """What `init_process_group` is asked for; nobody meets a group named lonely."""
    found = []

    def init(*arguments):
        found.append(arguments[:5])
        if arguments[4] == "lonely":
            raise RuntimeError("nobody there")
        return f"group {arguments[4]}"

    monkeypatch.setattr(weight_groups, "init_process_group", init)
    return found


def test_a_group_is_joined_at_its_address_as_the_rank_that_was_told(asked):
    groups = WeightGroups(CUDA)
    groups.join("10.0.0.1", 9, 1, 2, "a", "gloo")
    groups.join("10.0.0.1", 9, 4, 5, "b", "nccl")
    assert asked == [("gloo", "tcp://10.0.0.1:9", 2, 1, "a"), ("nccl", "tcp://10.0.0.1:9", 5, 4, "b")]
    assert (groups.device("a"), groups.device("b")) == (CPU, CUDA)


def test_what_cannot_be_joined_is_refused_and_may_be_tried_again(asked):
    def check(case):
        device, (rank, size, name, backend), said = case
        groups = WeightGroups(device)
        groups.join("10.0.0.1", 9, 1, 2, "taken", "gloo")
        groups._joining.add("joining")
        for _ in range(2):
            with pytest.raises(BadRequest, match=said):
                groups.join("10.0.0.1", 9, rank, size, name, backend)

    hold_each(REFUSED, check)


def test_every_tensor_is_there_before_receiving_ends(asked, monkeypatch):
    """Broadcasts are begun in the order of the tensors, all before the first is waited for."""
    said = []

    def broadcast(tensors, options):
        (tensor,) = tensors
        said.append(("begun", int(tensor), options.rootRank, options.asyncOp))
        return SimpleNamespace(wait=lambda: said.append(("there", int(tensor))))

    group = SimpleNamespace(broadcast=broadcast)
    monkeypatch.setattr(weight_groups, "init_process_group", lambda *_: group)
    groups = WeightGroups(CPU)
    groups.join("10.0.0.1", 9, 1, 2, "g", "gloo")
    groups.receive("g", [[torch.tensor(5), torch.tensor(3)]])
    begun = [("begun", number, 0, True) for number in (5, 3)]
    assert said == [*begun, ("there", 5), ("there", 3)]


def test_each_rank_of_an_engine_gets_what_the_trainer_broadcasts(unused_tcp_port):
    """All ranks of the group are threads of this process, the trainer's too."""
    address, timeout = f"tcp://127.0.0.1:{unused_tcp_port}", timedelta(seconds=60)
    groups = WeightGroups(CPU, tp_size=2)
    with ThreadPoolExecutor(2) as pool:
        trainer = pool.submit(join_again, address, 3, 0, "of ranks", timeout)
        pool.submit(groups.join, "127.0.0.1", unused_tcp_port, 1, 3, "of ranks", "gloo").result()
        sent, received = torch.arange(3), [[torch.zeros(3, dtype=torch.int64)] for _ in range(2)]
        pool.submit(groups.receive, "of ranks", received)
        trainer.result().broadcast([sent], dist.BroadcastOptions()).wait()
    assert all(torch.equal(tensor, sent) for (tensor,) in received)
    groups.leave("of ranks")
    with pytest.raises(BadRequest, match=r"rank_offset 2: wanted 1 to world_size - tp_size = 1"):
        groups.join("127.0.0.1", unused_tcp_port, 2, 3, "of ranks", "gloo")


@pytest.mark.parametrize(("device", "keeps"), [(CPU, True), (torch.device("meta"), False)])
def test_memory_of_the_host_is_kept_for_the_next_bucket(asked, monkeypatch, device, keeps):
    """Of a device the allocator keeps it."""
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    groups = WeightGroups(device)
    groups.join("10.0.0.1", 9, 1, 2, "g", "gloo")
    groups._devices["g"] = device
    (first,), (second,) = groups.buffers("g", 8), groups.buffers("g", 5)
    assert (first.numel(), second.numel()) == (8, 5) and second.device.type == device.type
    assert (first.untyped_storage()._cdata == second.untyped_storage()._cdata) is keeps
    assert groups.buffers("g", 9)[0].numel() == 9
    groups.leave("g")
    assert groups._kept == {}


def test_a_group_whose_trainer_went_away_within_a_broadcast_is_left_at_once(unused_tcp_port, monkeypatch):
    """The third rank gets what the first one passes on."""
    timeout = timedelta(seconds=120)
    monkeypatch.setattr(weight_groups, "_TIMEOUT", timeout)
    groups = WeightGroups(CPU, tp_size=3)
    with ThreadPoolExecutor(2) as pool:
        trainer = pool.submit(join_again, f"tcp://127.0.0.1:{unused_tcp_port}", 4, 0, "left", timeout)
        groups.join("127.0.0.1", unused_tcp_port, 1, 4, "left", "gloo")
        trainer.result()
        received = pool.submit(groups.receive, "left", [[torch.zeros(3)] for _ in range(3)])
        del trainer
        with pytest.raises(RuntimeError, match=r"(?i)connection"):
            received.result(60)
        pool.submit(groups.leave, "left").result(60)


def test_a_group_is_left_by_all_ranks_where_one_of_them_cannot_join(asked, monkeypatch):
    def gone(*arguments):
        raise RuntimeError("the trainer is gone")

    left = []
    monkeypatch.setattr(weight_groups, "join_again", gone)
    monkeypatch.setattr(dist, "destroy_process_group", left.append)
    groups = WeightGroups(CPU, tp_size=2)
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"cannot join group 'g' at 10\.0\.0\.1:9: the trainer is gone"):
            groups.join("10.0.0.1", 9, 1, 3, "g", "gloo")
    assert left == ["group g"] * 2
    with pytest.raises(BadRequest, match="group 'g' does not exist"):
        groups.leave("g")


def test_a_group_that_was_left_is_gone_and_its_name_is_free(asked, monkeypatch):
    left = []
    monkeypatch.setattr(dist, "destroy_process_group", left.append)
    groups = WeightGroups(CPU)
    groups.join("10.0.0.1", 9, 1, 2, "g", "gloo")
    groups.leave("g")
    assert left == ["group g"]
    for call in (groups.leave, groups.device, lambda name: groups.receive(name, [])):
        with pytest.raises(BadRequest, match=r"group 'g' does not exist \(known: \[\]\)"):
            call("g")
    groups.join("10.0.0.1", 9, 1, 2, "g", "gloo")
