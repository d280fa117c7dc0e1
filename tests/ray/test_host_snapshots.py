"""Snapshots in the memory of several hosts: what each keeps, and what ranks go on from where one is lost."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray import healing, host_snapshots, snapshot_holder
from slime.ray.ending import CannotStart
from slime.ray.healing import Healing
from slime.ray.losses import RanksLost
from slime.ray.snapshot_holder import SnapshotHolder
from slime.ray.snapshot_holders import HolderFailed, Holders
from slime.ray.snapshot_place import is_on_hosts, place_on_hosts, run_of
from slime.ray.trainer_snapshots import TrainerSnapshots, snapshot_directory
from slime.utils.checkpoint_record import write_record
from tests.ray.hosts import Host
from tests.run_args import config_with

RANKS = 2  # of a node


class Hosts(Holders):
    """Holders on hosts in place of Ray's nodes."""

    def __init__(self, config: Any, names: Mapping[Any, str], cluster: "Cluster") -> None:
        super().__init__(config, names)
        self._cluster, self._wanted = cluster, 0
        cluster.holders = self

    def _settle(self) -> str | None:
        self.nodes = {name: group.processes.nodes() for group, name in self._names.items()}
        self._holders |= {node: self._cluster.hosts[node] for node in self.ring}
        return self._opened()

    def wait(self, refs: list[Any], what: str, timeout: float | None = None) -> list[Any]:
        try:
            return [ref() for ref in refs]
        except (ValueError, OSError) as error:
            raise HolderFailed(str(error)) from error

    def done(self, refs: list[Any], timeout: float = 0) -> bool:
        return not self._cluster.slow

    def ask_living(self, method: str, *arguments: Any) -> dict[str, Any]:
        living = {node: host for node, host in self._holders.items() if not host.lost}
        return {node: getattr(host, method).remote(*arguments)() for node, host in living.items()}


class Role:
    """Ranks that write a part each into the memory of their hosts."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self.checkpoints: str | None = None
        self.rebuilt: list[tuple[str, int]] = []
        self.found: list[list[int]] = []
        self.processes = SimpleNamespace(nodes=cluster.of_ranks)

    def try_to_save(self, rollout_id: int, force_sync: bool, memory: str) -> list[str | None]:
        nodes, name = self._cluster.of_ranks(), Path(memory).name
        for rank, node in enumerate(nodes):
            place = self._cluster.hosts[node].place / name / f"iter_{rollout_id:07d}.tmp"
            assert place.is_dir(), "ranks other than the first one make none"
            (place / f"__{rank}_0.distcp").write_bytes(b"x" * (40 + rank))
            if rank == 0:
                (place / "model").mkdir()
                (place / "model" / "metadata.json").write_text("{}")
                (place / "empty").touch()
            write_record(place, rank, len(nodes))
        return [None]

    def rebuild(self, load: str | Path, up_to: int) -> int:
        self.rebuilt.append((Path(load).name, up_to))
        self.found = [self._cluster.hosts[node].ranks(up_to) for node in self._cluster.nodes]
        return up_to + 1

    def offload(self) -> None: ...

    def onload(self) -> None: ...


class Cluster:
    """Nodes with two ranks each, and one for those of a lost one."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.hosts = {node: Host() for node in (*nodes, "spare")}
        self.nodes = [*nodes]
        self.slow = False
        self.holders: Any = None

    def of_ranks(self) -> list[str]:
        return [node for node in self.nodes for _ in range(RANKS)]

    def lose(self, node: str) -> None:
        self.hosts[node].lost = True
        self.nodes[self.nodes.index(node)] = "spare"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts a run whose trainer has these nodes."""
    monkeypatch.setattr(healing, "node_is_alive", lambda: True)
    monkeypatch.setattr(snapshot_holder, "wait_one", lambda ref, what, timeout: ref())
    monkeypatch.setattr(snapshot_holder, "_CHUNK", 16)

    def start(nodes: Sequence[str], **flags: Any) -> Any:
        cluster = Cluster(nodes)
        monkeypatch.setattr(host_snapshots, "Holders", lambda *given: Hosts(*given, cluster))
        monkeypatch.setattr("slime.ray.snapshot_holders._bytes_of_a_host", lambda config: 0)
        given = dict(use_fault_tolerance=True, trainer_snapshot_interval=1, trainer_snapshot_copies=1)
        given |= dict(trainer_snapshot_dir=str(tmp_path), trainer_snapshots=place_on_hosts(tmp_path, "1a"))
        config = config_with(actor_num_nodes=len(nodes), **(given | flags))
        actor = Role(cluster)
        rollout: Any = SimpleNamespace(
            position=(-1, None),
            end=lambda: None,
            go_back=lambda load, rollout_id, state=None: None,
            may_restart=lambda: False,
        )
        snapshots = TrainerSnapshots(config, actor, Role(cluster), rollout)  # type: ignore[arg-type]

        def step(rollout_id: int) -> None:
            rollout.position = rollout_id, {"offset": rollout_id}
            snapshots.begin(rollout_id)
            snapshots.take(rollout_id, actor)  # type: ignore[arg-type]

        def lose(steps: int, at: int, *nodes: str) -> list[int]:
            taken: list[int] = []

            def take(rollout_id: int) -> None:
                taken.append(rollout_id)
                if rollout_id == at and taken.count(at) == 1:
                    for node in nodes:
                        cluster.lose(node)
                    raise RanksLost("killed")
                step(rollout_id)

            parts: Any = config, actor, Role(cluster), rollout, snapshots, lambda: None
            Healing(*parts).take_all(take, range(steps))
            return taken

        return SimpleNamespace(
            cluster=cluster, hosts=cluster.hosts, actor=actor, step=step, lose=lose, snapshots=snapshots
        )

    return start


def test_each_host_keeps_its_part_and_a_copy_of_that_of_the_node_before(run) -> None:
    started = run(["a", "b", "c"])
    for rollout_id in range(4):
        started.step(rollout_id)
    assert [started.hosts[node].ranks(3) for node in "abc"] == [[0, 1, 4, 5], [0, 1, 2, 3], [2, 3, 4, 5]]
    assert [started.hosts[node].ranks(2) for node in "abc"] == [[0, 1, 4, 5], [0, 1, 2, 3], [2, 3, 4, 5]]
    assert [started.hosts[node].ranks(1) for node in "abc"] == [[], [], []]
    names = {path.name for path in (started.hosts["b"].place / "actor" / "iter_0000003").rglob("*")}
    assert names == {"empty", "model", "metadata.json"} | {
        name.format(rank) for rank in range(4) for name in ("__{}_0.distcp", "record_0000{}.json")
    }


def test_without_copies_each_host_keeps_its_part_alone(run) -> None:
    started = run(["a", "b"], trainer_snapshot_copies=0)
    for rollout_id in range(2):
        started.step(rollout_id)
    assert [started.hosts[node].ranks(1) for node in "ab"] == [[0, 1], [2, 3]]
    assert started.snapshots.newest() == 1


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_lost_node_costs_the_step_under_way(run, lost: str, caplog: Any) -> None:
    """Ranks find the whole on each host; afterwards each has what it had, and the new one the lost one's."""
    started = run(["a", "b", "c"])
    assert started.lose(5, 3, lost) == [0, 1, 2, 3, 3, 4]
    assert started.actor.rebuilt == [("actor", 2)] and started.actor.found == [[*range(6)]] * 3
    assert "is started again from iteration 2, a snapshot in the memory of its hosts, which costs the " in (
        caplog.text
    )
    spare = "(node spare) has the part of rank(s)"
    assert (
        spare in caplog.text and f"from the memory of {os.uname().nodename} (node {lost})" not in caplog.text
    )
    nodes = [*started.cluster.nodes]
    for iteration in (3, 4):
        kept = [{*started.hosts[node].ranks(iteration)} for node in nodes]
        assert kept == [{0, 1, 4, 5}, {0, 1, 2, 3}, {2, 3, 4, 5}]


def test_a_node_that_is_lost_while_parts_are_brought_costs_no_more(run, monkeypatch, caplog: Any) -> None:
    started, copy_parts = run(["a", "b", "c", "d"]), SnapshotHolder.copy_parts

    def losing(*arguments: Any) -> None:
        if not started.hosts["c"].lost and started.hosts["a"].lost:
            started.cluster.lose("c")
            raise HolderFailed("c is lost")
        copy_parts(*arguments)

    monkeypatch.setattr(SnapshotHolder, "copy_parts", losing)
    assert started.lose(4, 3, "a") == [0, 1, 2, 3, 3]
    assert started.actor.rebuilt == [("actor", 2)] and started.actor.found == [[*range(8)]] * 4
    assert caplog.text.count("the parts of iteration 2 are asked for again: c is lost") == 1


def test_parts_of_others_are_given_back_when_ranks_have_them(run) -> None:
    started = run(["a", "b", "c"])
    started.lose(4, 3)
    assert started.actor.found == [[*range(6)]] * 3
    assert [started.hosts[node].ranks(2) for node in "abc"] == [[0, 1, 4, 5], [0, 1, 2, 3], [2, 3, 4, 5]]


def test_a_lost_rank_finds_the_parts_of_other_nodes(run) -> None:
    started = run(["a", "b"], trainer_snapshot_copies=0)
    assert started.lose(4, 2) == [0, 1, 2, 2, 3]
    assert started.actor.rebuilt == [("actor", 1)] and started.actor.found == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(("lost", "copies"), [("a", 0), ("ab", 1)])
def test_parts_that_no_host_has_end_a_run_without_checkpoints(run, lost: str, copies: int) -> None:
    started = run(["a", "b", "c"], trainer_snapshot_copies=copies)
    with pytest.raises(RanksLost):
        started.lose(4, 2, *lost)


def test_a_snapshot_whose_copies_failed_is_told_of_once_and_an_older_one_outlives_a_node(
    run, caplog: Any
) -> None:
    started = run(["a", "b"])
    started.step(0)
    started.hosts["b"].copy_fails = True
    for rollout_id in (1, 2, 3):
        started.step(rollout_id)
    assert caplog.text.count("a snapshot has no copies, and is lost with a node: full") == 1
    assert started.snapshots.newest() == 3
    started.cluster.lose("a")
    assert started.snapshots.newest() == 0 and started.snapshots.position(0) == {"offset": 0}


def test_no_snapshot_is_begun_while_copies_are_on_their_way(run, caplog: Any) -> None:
    started = run(["a", "b"])
    started.step(0)
    started.cluster.slow = True
    started.step(1)
    started.step(2)
    assert started.snapshots.newest() == 0
    assert caplog.text.count("copies of the last snapshot are still on their way to other nodes") == 1
    started.cluster.slow = False
    started.step(3)
    assert started.snapshots.newest() == 3


def test_a_holder_that_is_lost_ends_nothing(run, caplog: Any) -> None:
    started = run(["a", "b"])
    started.step(0)
    started.hosts["b"].lost = True
    started.step(1)
    started.step(2)
    assert (
        caplog.text.count("lost ranks would go on from an older one or from a checkpoint: the host is") == 1
    )
    assert started.snapshots.newest() == 0


def test_a_part_that_is_damaged_is_taken_from_its_copy(run) -> None:
    started = run(["a", "b", "c"], verify_checkpoint="checksums")
    started.step(0)
    started.step(1)
    (started.hosts["b"].place / "actor" / "iter_0000001" / "__2_0.distcp").write_bytes(b"y" * 42)
    assert started.snapshots.newest() == 1
    started.snapshots.bring(1)
    assert started.hosts["b"].ranks(1) == [*range(6)]


def test_steps_that_are_taken_again_have_no_later_snapshot(run) -> None:
    started = run(["a", "b"])
    for rollout_id in range(3):
        started.step(rollout_id)
    assert started.snapshots._store.newest({0, 1}) == 1  # of others the driver knows no position
    started.snapshots.go_back(1)
    assert started.snapshots.newest() == 1
    assert not [*started.hosts["b"].place.glob("actor/iter_0000002*")]
    started.snapshots.discard()
    assert started.snapshots.newest() is None


def test_later_snapshots_are_forgotten_where_a_node_is_missing(run, monkeypatch) -> None:
    started = run(["a", "b"])
    for rollout_id in range(3):
        started.step(rollout_id)

    def missing(holders: Hosts) -> None:
        raise HolderFailed("no node")

    monkeypatch.setattr(Hosts, "_settle", missing)
    started.snapshots.go_back(1)
    assert not [*started.hosts["b"].place.glob("actor/iter_0000002*")]


def test_ranks_that_are_all_on_one_node_are_refused_copies(run) -> None:
    with pytest.raises(
        CannotStart, match=r"--trainer-snapshot-copies 1: Ray has put all ranks of the .* one"
    ):
        run(["a"])


def test_a_host_without_room_or_leave_to_write_is_named(tmp_path: Path) -> None:
    told = SnapshotHolder().open(str(tmp_path), "1a_b_", 2**60)
    assert told and f" of {os.uname().nodename} has " in told and "GiB left (wanted: 1073741" in told
    (tmp_path / "file").touch()
    told = SnapshotHolder().open(str(tmp_path / "file"), "1a_b_", 0)
    assert told == (
        f"--trainer-snapshot-dir {tmp_path}/file of {os.uname().nodename}: cannot be written to (File exists)"
    )


def test_a_file_outside_a_snapshot_is_neither_read_nor_written(tmp_path: Path) -> None:
    holder = SnapshotHolder()
    holder.open(str(tmp_path), "1a_b_", 0)
    with pytest.raises(ValueError, match=r"'\.\./\.\./secret' is not in "):
        holder.read("actor", 1, "../../secret", 0)


def test_the_driver_makes_no_directory_where_each_host_has_its_own(tmp_path: Path) -> None:
    given = dict(use_fault_tolerance=True, trainer_snapshot_interval=1, trainer_snapshot_dir=str(tmp_path))
    with snapshot_directory(config_with(actor_num_nodes=2, trainer_snapshot_copies=1, **given)) as place:
        assert place is not None and is_on_hosts(place) and not [*tmp_path.iterdir()]
        assert place == place_on_hosts(tmp_path, run_of(place))
