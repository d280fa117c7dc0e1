"""Standbys of trainer ranks: who takes a place, who is replaced, and what the loss of one costs."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray

from slime.ray import rank_processes
from slime.ray.rank_processes import GPU_PER_ACTOR, RankProcesses
from tests.run_args import config_with

LOST = ray.exceptions.RayActorError()
HERE, ELSEWHERE = ("node", 1), ("another node", 1)


class Actor:
    """An actor whose answers the test gives.

    Attributes:
        answer: to every question: where it is, None for none yet, or what Ray raises.
    """

    def __init__(self, kind, options, arguments):
        self.kind, self.options, self.arguments = kind, options, arguments
        self.answer, self.killed, self.place = None, False, None

    @property
    def process_location(self):
        return SimpleNamespace(remote=lambda: self)

    @property
    def take_place(self):
        return SimpleNamespace(remote=self._take)

    def _take(self, *place):
        self.place = place
        return self


class Ray:
    """In place of the module: a reference is the actor that is asked."""

    exceptions, ObjectRef = ray.exceptions, ray.ObjectRef

    def __init__(self):
        self.made, self.timeouts = [], []

    def remote(self, kind):
        def options(**given):
            return SimpleNamespace(remote=lambda *arguments: self._made(kind, given, arguments))

        return SimpleNamespace(options=options)

    def _made(self, kind, options, arguments):
        self.made.append(Actor(kind.__name__, options, arguments))
        return self.made[-1]

    def wait(self, refs, num_returns=1, timeout=None):
        self.timeouts.append(timeout)
        done = [ref for ref in refs if ref.answer is not None]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref, timeout=None):
        if ref.answer is None:
            raise self.exceptions.GetTimeoutError
        if not isinstance(ref.answer, tuple):
            raise ref.answer
        return ref.answer

    def kill(self, actor):
        actor.killed = True


class Slots:
    gpu_ids, nodes = (3, 5), ("node", "node")

    def __len__(self):
        return 2

    def strategy(self, rank):
        return f"slot {rank}"


@pytest.fixture
def processes(monkeypatch):
    """A function of a number of standbys: the processes of two ranks, and Ray."""
    stand_in = Ray()
    monkeypatch.setattr(rank_processes, "ray", stand_in)
    monkeypatch.setattr(rank_processes, "process_env", lambda *arguments, **options: {})
    monkeypatch.setattr(rank_processes, "runtime_env", lambda env: {})

    def start(standbys):
        config = config_with(trainer_standbys=standbys)
        found = RankProcesses(config, "actor", Slots())
        found.start(config)
        found.keep_standbys()
        return found, stand_in, config

    return start


def standbys_of(stand_in):
    return [actor for actor in stand_in.made if actor.kind == "StandbyRank" and not actor.killed]


def test_without_standbys_all_ranks_are_fresh(processes):
    group, stand_in, config = processes(0)
    group.start(config)
    assert [actor.kind for actor in stand_in.made] == ["TrainRayActor"] * 4
    assert [actor.arguments[1:] for actor in stand_in.made[:2]] == [("actor", 0, 2), ("actor", 1, 2)]
    assert stand_in.made[0].options["num_gpus"] == GPU_PER_ACTOR


def test_a_standby_is_in_the_slot_of_its_rank_and_takes_no_share_of_the_gpu(processes):
    _, stand_in, _ = processes(1)
    found = [(one.options["num_gpus"], one.options["scheduling_strategy"]) for one in standbys_of(stand_in)]
    assert found == [(0, "slot 0"), (0, "slot 1")]


def test_standbys_become_the_ranks_and_others_are_started_for_them(processes):
    group, stand_in, _ = processes(1)
    first = standbys_of(stand_in)
    for standby in first:
        standby.answer = HERE
    config = config_with(load="elsewhere")
    assert group.start(config) == first
    assert [one.place for one in first] == [
        (config.flat, "actor", rank, 2, str(3 + 2 * rank)) for rank in (0, 1)
    ]
    group.keep_standbys()
    assert len(standbys_of(stand_in)) == 4
    group.keep_standbys()  # there is one of each rank
    assert len(standbys_of(stand_in)) == 4


def test_a_standby_that_is_not_ready_goes_on_waiting_and_its_rank_is_fresh(processes):
    group, stand_in, config = processes(1)
    first, second = standbys_of(stand_in)
    second.answer = HERE
    found = group.start(config)
    assert found[0].kind == "TrainRayActor" and found[1] is second
    assert not first.killed


def test_the_rank_of_a_slot_that_has_moved_to_another_node_is_fresh(processes):
    """Which GPU it has there is not known to a standby, which holds none."""
    group, stand_in, config = processes(1)
    first, second = standbys_of(stand_in)
    first.answer, second.answer = ELSEWHERE, HERE
    found = group.start(config)
    assert found[0].kind == "TrainRayActor" and found[1] is second


@pytest.mark.parametrize("answer", [None, LOST], ids=["stopped", "ended"])
def test_a_standby_that_is_lost_when_it_is_wanted_costs_seconds_and_its_rank_is_fresh(processes, answer):
    group, stand_in, config = processes(1)
    first, second = standbys_of(stand_in)
    first.answer = second.answer = HERE
    group.keep_standbys()
    group._look = lambda: None  # it happens after the look
    first.answer = answer
    found = group.start(config)
    assert found[0].kind == "TrainRayActor" and found[1] is second
    assert first.killed and max(timeout or 0 for timeout in stand_in.timeouts) <= 10


def test_one_that_ends_while_it_waits_is_replaced_one_that_cannot_start_is_not(processes, caplog):
    group, stand_in, config = processes(1)
    first, second = standbys_of(stand_in)
    first.answer = HERE
    group.keep_standbys()
    first.answer = second.answer = LOST
    group.keep_standbys()
    group.keep_standbys()
    found = [one.options["scheduling_strategy"] for one in standbys_of(stand_in)]
    assert found == ["slot 0", "slot 1", "slot 0"]
    assert "a standby of rank 0 has ended, another one is started" in caplog.text
    assert "a standby of rank 1 has ended, none is started in its place" in caplog.text
    assert [one.kind for one in group.start(config)] == ["TrainRayActor"] * 2


def test_all_standbys_end_with_the_group(processes):
    group, stand_in, _ = processes(2)
    assert len(standbys_of(stand_in)) == 4
    group.end_standbys()
    assert not standbys_of(stand_in)


_BECOMES = """
import json, os, sys, torch
from unittest.mock import patch
from slime.ray.standby_rank import StandbyRank
from tests.run_args import run_args
before = set(sys.modules)
args = run_args()
standby = StandbyRank(args)
waits = {
    "group": torch.distributed.is_initialized(),
    "cuda": torch.cuda.is_initialized(),
    "rank": os.environ.get("RANK"),
    "backend": "slime.backends.megatron_utils.worker" in sys.modules,
}
with patch("slime.ray.standby_rank.StandbyRank.process_location", lambda self: "here"):
    place = standby.take_place(args, "actor", 1, 2, "0")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
print(json.dumps([waits, place, {name: os.environ[name] for name in names}, standby._config.cluster.rank]))
"""


def test_a_standby_has_the_trainer_imported_and_is_in_no_group_before_it_is_a_rank():
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", _BECOMES], env=env, capture_output=True, text=True, timeout=600, check=True
    )
    waits, place, environment, rank = json.loads(done.stdout.splitlines()[-1])
    assert waits == {"group": False, "cuda": False, "rank": None, "backend": True}
    assert place == "here" and rank == 1
    assert environment == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
