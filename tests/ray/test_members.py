"""Another fleet takes the place of one whose rollout manager was lost, with those who belonged to it."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.ray import engine, engine_watch, members, membership
from slime.ray.engine import EngineState, MembershipError
from slime.ray.engine_group import EngineGroup
from slime.ray.fleet import Fleet
from slime.ray.members import KeptMembers, Members
from slime.ray.served_model import ServedModel
from tests.ray.stand_ins import Cluster, Router, Source, client_class, wait_until
from tests.run_args import config_with

Make = Callable[..., tuple[Fleet, Cluster]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make(former)``: a fleet of three engines, and two spare places."""

    def build(former: Members | None = None) -> tuple[Fleet, Cluster]:
        cluster = Cluster()
        monkeypatch.setattr(engine, "EngineClient", client_class(cluster))
        monkeypatch.setattr(engine_watch, "LOOK_INTERVAL", 600)
        monkeypatch.setattr(membership, "_LOOK_AGAIN", 0.01)
        groups = [EngineGroup(Source(cluster, 3))]
        groups.append(EngineGroup(Source(cluster, 2), first_rank=3, spare=True))
        model = ServedModel("default", groups, lambda: Router(cluster))
        fleets.append(Fleet(config_with(use_fault_tolerance=True), [model], former))
        fleets[-1].start()
        return fleets[-1], cluster

    fleets: list[Fleet] = []
    yield build
    for fleet in fleets:
        fleet.stop()
        fleet._watch._pool.shutdown()


def states(fleet: Fleet) -> list[str]:
    return [row.state for row in fleet.membership.rows()]


def update(fleet: Fleet) -> None:
    fleet.membership.begin_update()
    fleet.recover()
    fleet.admit("1")


READY = "ready, joins with the next update"


def test_those_that_have_joined_are_there_again_and_those_that_have_left_are_not(make: Make) -> None:
    fleet, _ = make()
    fleet.membership.add(1)
    wait_until(lambda: states(fleet)[3] == READY)
    update(fleet)
    fleet.membership.drain([1], seconds=0)
    wait_until(lambda: states(fleet)[1] == "free")
    fleet.membership.add(1)  # takes place 1
    wait_until(lambda: states(fleet)[1] == READY)
    assert states(fleet) == ["serving", READY, "serving", "serving", "free"] and fleet.gpus == 3

    again, cluster = make(fleet.membership.members())
    wait_until(lambda: states(again)[1] == READY)
    assert states(again) == ["serving", READY, "serving", "serving", "free"]
    assert cluster.routed == ["http://engine0", "http://engine2", "http://engine3"]
    assert again.metrics()["fleet/default/engines"] == 3
    update(again)
    assert "http://engine1" in cluster.routed and states(again)[1] == "serving" and again.gpus == 4


def test_without_a_fleet_before_it_the_flags_say_who_starts(make: Make) -> None:
    fleet, _ = make()
    assert states(fleet) == ["serving"] * 3 + ["free"] * 2 and fleet.metrics() == {}
    again, _ = make(fleet.membership.members())
    assert states(again) == ["serving"] * 3 + ["free"] * 2 and again.metrics() == {}


def test_the_dead_are_there_again_unless_they_had_never_served(make: Make) -> None:
    fleet, cluster = make()
    fleet.membership.add(1)
    wait_until(lambda: states(fleet)[3] == READY)
    fleet.membership.begin_update()
    cluster.ended = {1: "killed", 3: "killed"}
    fleet._watch.look()
    assert states(fleet) == ["serving", "dead", "serving", "dead", "free"]
    found = fleet.membership.members()
    assert (found.places, found.joining) == ({0, 1, 2}, set())


def test_who_leaves_or_is_to_does_not_start_again_and_notices_hold(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, cluster = make()
    cluster.loads = {"http://engine0": 1}
    fleet.membership.drain([0], seconds=600, notice=300)
    fleet.membership.begin_update()
    fleet.membership.drain([1], seconds=600)
    assert states(fleet)[1] == "serving, drains after the update"
    kept = KeptMembers()
    assert kept.take(fleet.membership.ask("rows"))[0].state == "free when its notice ends"

    former, now = kept.now(), time.monotonic()
    again, _ = make(former)
    assert states(again) == ["free when its notice ends", "free", "serving", "free", "free"]
    assert again.membership.add(2) == [1, 3]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now + 600)
    assert states(again)[0] == "free"


def test_an_engine_that_died_on_a_place_that_is_taken_away_does_not_start_again(make: Make) -> None:
    fleet, cluster = make()
    fleet.membership.begin_update()
    fleet.membership.drain([2], seconds=0, notice=300)
    cluster.ended = {2: "killed"}
    update(fleet)
    assert fleet.models["default"].engines[2].state is EngineState.DEAD
    again, _ = make(fleet.membership.members())
    assert states(again)[:3] == ["serving", "serving", "free when its notice ends"]


def test_nobody_joins_on_a_place_that_a_fleet_is_about_to_take_again(make: Make) -> None:
    fleet, _ = make()
    former = fleet.membership.members()
    again = Fleet(config_with(use_fault_tolerance=True), list(fleet.models.values()), former)
    with pytest.raises(MembershipError, match="the rollout side starts again"):
        again.membership.add(1)


def test_what_was_told_last_is_kept_whoever_hears_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, clock = KeptMembers(), [100.0]
    monkeypatch.setattr(members, "time", type("Time", (), {"monotonic": lambda: clock[0]}))
    assert kept.now() is None

    def told(number: int, notices: dict[int, float]) -> Members:
        return Members(number, frozenset({number}), frozenset(), notices)

    assert kept.take(("an answer", told(2, {5: 60.0}))) == "an answer"
    kept.take((None, told(1, {})))
    clock[0] += 20
    assert kept.now() == told(2, {5: 40.0})
    kept.take((None, told(3, {})))
    assert kept.now() == told(3, {})


def test_the_next_fleet_tells_newer_ones(make: Make) -> None:
    fleet, _ = make()
    kept = KeptMembers()
    for _ in range(3):
        kept.take(fleet.membership.ask("rows"))
    again, _ = make(kept.now())
    kept.take(again.membership.ask("drain", [1], 0.0))
    found: Any = kept.now()
    assert found.places == {0, 2}
