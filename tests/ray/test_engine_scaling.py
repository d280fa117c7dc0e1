"""Engines join and leave by the requests that there are."""

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils.client import EngineError
from slime.config.engines import EngineConfig
from slime.ray import engine_scaling
from slime.ray.engine import EngineState, MembershipError
from slime.ray.engine_scaling import Bounds, EngineScaling, wanted
from slime.utils.background_generation import background_generation
from slime.utils.notes import take_notes
from slime.utils.weight_clock import clock
from tests.run_args import config_with


def test_a_crowd_has_as_many_engines_come_as_it_needs() -> None:
    bounds = Bounds(1, 8, queue=10)
    assert [wanted(bounds, 2, requests) for requests in (0, 9.9, 10, 20, 30, 31, 45, 500)] == [
        *(1, 1, 2, 2, 2, 4, 5, 8)
    ]


def test_what_somebody_has_asked_for_beyond_the_bounds_stays() -> None:
    assert wanted(Bounds(1, 2, 10), 3, 1000) == 3
    assert wanted(Bounds(3, 4, 10), 2, 0) == 2


def test_no_decision_takes_the_one_before_it_back() -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        least = rng.randint(1, 5)
        bounds = Bounds(least, least + rng.randint(0, 20), rng.choice((0.5, 1, 3, 64)))
        engines, requests = rng.randint(1, 30), rng.uniform(0, 40) * bounds.queue
        found = wanted(bounds, engines, requests)
        assert wanted(bounds, found, requests) == found, (bounds, engines, requests)
        if least <= engines <= bounds.most:
            assert least <= found <= bounds.most


class Members:
    """A model and its membership: engines that serve, each with some requests, and free places."""

    name = "default"

    def __init__(self, engines: int, places: int) -> None:
        self.engines = [self._engine(rank) for rank in range(engines)]
        self.joiners: list[Any] = []
        self.places, self.asked, self.refuses = places, [], False

    @staticmethod
    def _engine(rank: int) -> Any:
        return SimpleNamespace(rank=rank, state=EngineState.SERVING, requests=0)

    def free_ranks(self) -> list[int]:
        taken = {engine.rank for engine in (*self.engines, *self.joiners)}
        return [rank for rank in range(self.places) if rank not in taken]

    def add(self, count: int, name: str) -> list[int]:
        ranks = self.free_ranks()[:count]
        self.asked.append(("add", ranks))
        self.joiners += map(self._engine, ranks)
        return ranks

    def drain(self, ranks: list[int], seconds: float) -> None:
        if self.refuses:
            raise MembershipError("engine 1 is drained already")
        self.asked.append(("drain", ranks))
        for engine in self.engines:
            if engine.rank in ranks:
                engine.state = EngineState.DRAINING


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch):
    """``scaling(members, **flags)``: with two looks for a decision."""

    def requests_of(engine: Any) -> int:
        if engine.requests is None:
            raise EngineError("http://engine0", "/v1/loads", None, "no answer")
        return engine.requests

    def make(members: Any, **flags: Any) -> EngineScaling:
        options = {"rollout_queue_per_engine": 10.0, "rollout_scaling_interval": 8.0} | flags
        config: EngineConfig = config_with(**options).engines
        return EngineScaling(config, [members], members)

    monkeypatch.setattr(engine_scaling, "requests_of", requests_of)
    return make


def look(scaled: EngineScaling, members: Members, *counts: int | None) -> list[Any]:
    """What was asked for after looks at so many requests, all of them at the first engine."""
    members.asked.clear()
    for count in counts:
        members.engines[0].requests = count
        scaled.look(threading.Event())
    return list(members.asked)


def test_the_mean_of_an_interval_decides(scaling) -> None:
    members = Members(engines=1, places=4)
    scaled = scaling(members)
    assert look(scaled, members, 100) == []
    assert look(scaled, members, 0) == [("add", [1, 2, 3])]
    assert look(scaled, members, 100, 100) == []  # no place is free, and nobody leaves while others come
    assert look(scaled, members, 0, 0) == []
    members.engines += members.joiners
    members.joiners = []
    assert look(scaled, members, 22, 22) == []
    assert look(scaled, members, 11, 11) == [("drain", [2, 3])]
    members.engines = members.engines[:2]
    assert look(scaled, members, 0, 0) == [("drain", [1])]


def test_bounds_hold(scaling) -> None:
    members = Members(engines=2, places=8)
    scaled = scaling(members, rollout_min_engines=2, rollout_max_engines=3)
    assert look(scaled, members, 900, 900) == [("add", [2])]
    members.engines += members.joiners
    members.joiners = []
    assert look(scaled, members, 0, 0) == [("drain", [2])]
    members.engines.pop()
    assert look(scaled, members, 0, 0) == []


def test_no_decision_is_made_of_what_nobody_knows(scaling) -> None:
    members = Members(engines=1, places=4)
    scaled = scaling(members)
    assert look(scaled, members, 100, None, None) == []
    over = threading.Event()
    over.set()
    members.engines[0].requests = 100
    scaled.look(over)
    assert members.asked == []
    assert look(scaled, members, 100) == [("add", [1, 2, 3])]


def test_who_may_not_leave_stays(scaling) -> None:
    members = Members(engines=2, places=2)
    members.refuses = True
    take_notes()  # those of other tests
    assert look(scaling(members), members, 0, 0) == []
    (told,) = take_notes()
    assert "0.0 requests of 2 engines, which stay: engine 1 is drained already" in told


def test_it_looks_while_engines_generate(scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_scaling, "LOOK_S", 0.01)
    members, joined = Members(engines=1, places=2), threading.Event()
    members.engines[0].requests = 100
    monkeypatch.setattr(members, "add", lambda *_: joined.set())
    scaled = scaling(members, rollout_scaling_interval=0.02)
    wait_until(lambda: not counting())  # of other tests
    with scaled.while_generating():
        assert joined.wait(60)
    wait_until(lambda: not counting())
    nobody: Any = Members(engines=0, places=0)
    with EngineScaling(config_with(rollout_queue_per_engine=1.0).engines, [], nobody).while_generating():
        assert not counting()
    with scaling(members, rollout_queue_per_engine=None).while_generating():
        assert scaled._counts == [] or len(scaled._counts) == 1


def test_it_looks_between_rollouts_as_long_as_answers_are_made_then(
    scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_scaling, "LOOK_S", 0.01)
    members, left, worker = Members(engines=2, places=2), threading.Event(), Members(0, 0)
    monkeypatch.setattr(members, "drain", lambda *_: left.set())
    scaled = scaling(members, rollout_scaling_interval=0.03)
    wait_until(lambda: not counting())  # of other tests
    background_generation.begin(worker)
    try:
        with scaled.while_generating():
            pass
        assert left.wait(60)
        with scaled.while_generating():
            assert len(counting()) == 1
    finally:
        background_generation.end(worker)
    wait_until(lambda: not counting())
    background_generation.begin(worker)
    try:
        with scaled.while_generating():
            pass
        assert len(counting()) == 1
        scaled.stop()
        wait_until(lambda: not counting())
    finally:
        background_generation.end(worker)
    left.clear()
    with scaled.while_generating():
        pass
    wait_until(lambda: not counting())


def counting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine-scaling"]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_engines_that_stand_still_for_new_weights_are_not_counted(scaling) -> None:
    members = Members(engines=2, places=2)
    scaled = scaling(members)
    clock.begin_update()
    try:
        assert look(scaled, members, 0, 0, 0) == []
    finally:
        clock.__init__()  # type: ignore[misc]
    assert look(scaled, members, 0, 0) == [("drain", [1])]


def test_rollouts_that_are_shorter_than_the_time_between_two_counts_are_counted_too(
    scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_scaling, "LOOK_S", 0.5)
    members, joined = Members(engines=1, places=2), threading.Event()
    members.engines[0].requests = 100
    monkeypatch.setattr(members, "add", lambda *_: joined.set())
    scaled = scaling(members, rollout_scaling_interval=0.5)
    deadline = time.monotonic() + 60
    while not joined.is_set():
        assert time.monotonic() < deadline
        with scaled.while_generating():
            joined.wait(0.1)
        time.sleep(0.05)  # until the thread has ended
