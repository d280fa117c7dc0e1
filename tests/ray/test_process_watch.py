"""An actor that somebody has stopped is found on whatever node it runs."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.processes.stopped import is_running
from slime.ray import process_watch
from slime.ray.process_watch import ProcessStopped, ProcessWatch, process_location
from slime.ray.waiting import wait_all
from tests.ray.nodes import joined_nodes

pytestmark = pytest.mark.cluster


@ray.remote
class Rank:
    def process_location(self) -> tuple[str, int]:
        return process_location()

    def collective(self) -> None:
        time.sleep(600)


@pytest.fixture(scope="module", autouse=True)
def two_nodes() -> Iterator[Cluster]:
    with joined_nodes({"num_cpus": 4}, {"num_cpus": 4}) as cluster:
        yield cluster


@pytest.fixture
def ranks() -> Iterator[list[Any]]:
    """One on each node."""
    nodes = [node["NodeID"] for node in ray.nodes()]
    places = [NodeAffinitySchedulingStrategy(node_id=node, soft=False) for node in nodes]
    actors = [Rank.options(num_cpus=0, scheduling_strategy=place).remote() for place in places]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_ends_the_wait_by_name(ranks: list[Any], victim: int) -> None:
    watch = ProcessWatch(limit=2.0)
    for rank, actor in enumerate(ranks):
        watch.add(f"rank {rank}", actor)
    _, pid = ray.get(ranks[victim].process_location.remote())
    watch.check()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ProcessStopped, match=rf"rank {victim} \(process {pid}\) is stopped \(SIGSTOP\)"):
            wait_all([actor.collective.remote() for actor in ranks], "training", 150, watch.check)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_the_log_has_the_call_in_which_a_rank_hangs(ranks: list[Any], caplog) -> None:
    watch = ProcessWatch()
    for rank, actor in enumerate(ranks):
        watch.add(f"rank {rank}", actor)
    pids = ray.get([actor.process_location.remote() for actor in ranks])
    hung = [actor.collective.remote() for actor in ranks]
    deadline = time.monotonic() + 150
    told: list[str] = []
    while time.monotonic() < deadline and not all("collective" in text for text in told[-2:] or [""]):
        caplog.clear()
        watch.show_stacks()
        told = [record.getMessage() for record in caplog.records if " is in:" in record.getMessage()]
        assert len(told) == 2 and not any("py-spy is not installed" in text for text in told)
    assert {f"rank {rank} (process {pid})" for rank, (_, pid) in enumerate(pids)} == {
        text.partition(" is in:")[0] for text in told
    }
    assert all("collective" in text for text in told) and len(hung) == 2


@ray.remote(num_cpus=0)
class Starting:
    """Says who it is, and then takes long over its start."""

    def __init__(self, place: str) -> None:
        Path(place).with_suffix(".new").write_text(str(os.getpid()))
        Path(place).with_suffix(".new").rename(place)
        time.sleep(600)

    def process_location(self) -> tuple[str, int]:
        return process_location()


@pytest.mark.parametrize("node", [0, 1])
def test_one_that_is_stopped_while_it_starts_is_found_too(node: int, tmp_path: Path) -> None:
    """It has told nobody yet where it is, and never will."""
    place = NodeAffinitySchedulingStrategy(node_id=ray.nodes()[node]["NodeID"], soft=False)
    actor = Starting.options(scheduling_strategy=place).remote(str(tmp_path / "pid"))
    watch = ProcessWatch(limit=2.0)
    watch.add("the manager", actor)
    deadline = time.monotonic() + 150
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ProcessStopped, match=rf"the manager \(process {pid}\) is stopped"):
            wait_all([actor.process_location.remote()], "the start", 60, watch.check)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_rank_that_goes_on_is_forgiven(ranks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_watch, "_LOOK_TIMEOUT", 120.0)  # what a look finds is found while it looks
    watch = ProcessWatch(limit=0.5)
    watch.add("rank 0", ranks[0])
    _, pid = ray.get(ranks[0].process_location.remote())
    os.kill(pid, signal.SIGSTOP)
    watch.check()
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.6)
    watch.check()
    os.kill(pid, signal.SIGSTOP)
    watch.check()
    os.kill(pid, signal.SIGCONT)


def test_ranks_are_waited_for_until_they_are_gone(ranks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One was killed although it was stopped; the other one lives, and is told of."""
    monkeypatch.setattr(process_watch, "_LOOK_TIMEOUT", 120.0)  # a worker starts for the look
    watch = ProcessWatch()
    for rank, actor in enumerate(ranks):
        watch.add(f"rank {rank}", actor)
    pids = [ray.get(actor.process_location.remote())[1] for actor in ranks]
    os.kill(pids[0], signal.SIGSTOP)
    ray.kill(ranks[0])
    while is_running(pids[0]):
        time.sleep(0.05)
    with pytest.raises(ProcessStopped, match=rf"rank 1 \(process {pids[1]}\) was killed and is still there"):
        watch.wait_until_gone(0.5)
    ray.kill(ranks[1])
    watch.wait_until_gone(120)
    assert not any(is_running(pid) for pid in pids)


def known_on(node: str, watch: ProcessWatch) -> None:
    """Returns when the watch knows of an actor on the node."""
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    actor = Rank.options(num_cpus=0, scheduling_strategy=place).remote()
    watch.add("rank 2", actor)
    ray.get(actor.process_location.remote())
    watch.check()


def test_a_node_that_is_gone_is_left_to_ray(two_nodes: Cluster) -> None:
    node = two_nodes.add_node(num_cpus=1)
    watch = ProcessWatch()
    known_on(node.node_id, watch)
    two_nodes.remove_node(node)
    while any(one["NodeID"] == node.node_id and one["Alive"] for one in ray.nodes()):
        time.sleep(0.1)
    for _ in range(3):
        watch.check()


def test_a_node_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.get_runtime_context().get_node_id()
    (there,) = (node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    watch = ProcessWatch()
    asked: list[Any] = []
    silent = ray.remote(num_cpus=0)(lambda: time.sleep(600))

    def ask(*_: object) -> ray.ObjectRef:
        asked.append(silent.remote())
        return asked[-1]

    monkeypatch.setattr(process_watch, "_LOOK_TIMEOUT", 0.2)
    with monkeypatch.context() as nobody_answers:
        nobody_answers.setattr(process_watch, "_ask", ask)
        known_on(there, watch)
        for _ in range(3):
            watch.check()
        assert len(asked) == 1
        ray.cancel(asked[0], force=True)
        ray.wait(asked, timeout=120)
        deadline = time.monotonic() + 120  # until the news that this ask has failed is here
        while len(asked) == 1 and time.monotonic() < deadline:
            watch.check()
    assert len(asked) == 2
    ray.cancel(asked[1], force=True)
