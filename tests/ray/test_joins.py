"""Engines join a fleet at request, with stand-ins for the processes."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from slime.backends.sglang_utils.server_engine import EngineStartError
from slime.ray import engine, engine_watch
from slime.ray.engine import EngineState, MembershipError
from slime.ray.engine_group import EngineGroup
from slime.ray.engine_watch import EngineFailure
from slime.ray.fleet import Fleet
from slime.ray.served_model import ServedModel
from slime.utils.engine_count import engine_count
from tests.ray.stand_ins import Cluster, Handle, Router, Source, client_class, wait_until
from tests.run_args import config_with


class SlowSource(Source):
    """Its engines start once `may_start` is set, unless there is a reason why they do not."""

    def __init__(self, cluster: Cluster, places: int) -> None:
        super().__init__(cluster, places)
        self.may_start, self.reason = threading.Event(), ""

    def wait_ready(self, handles: Sequence[Handle], timeout: float) -> list[Any]:
        assert not handles or self.may_start.wait(120)
        if handles and self.reason:
            raise EngineStartError(self.reason)
        return super().wait_ready(handles, timeout)


Make = Callable[..., tuple[Fleet, Cluster, SlowSource]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make()``: a fleet of one engine that serves version 1, and two spare places."""

    def build(fault_tolerant: bool = False, **options: Any) -> tuple[Fleet, Cluster, SlowSource]:
        cluster = Cluster()
        monkeypatch.setattr(engine, "EngineClient", client_class(cluster))
        monkeypatch.setattr(engine_watch, "LOOK_INTERVAL", 0.01)
        spare = SlowSource(cluster, 2)
        groups = [EngineGroup(Source(cluster, 1)), EngineGroup(spare, first_rank=1, spare=True)]
        config = config_with(use_fault_tolerance=fault_tolerant)
        fleet = Fleet(config, [ServedModel("default", groups, lambda: Router(cluster), **options)])
        fleets.append((fleet, spare))
        fleet.start()
        return fleet, cluster, spare

    fleets: list[tuple[Fleet, SlowSource]] = []
    yield build
    for fleet, spare in fleets:
        fleet.stop()
        spare.may_start.set()
        fleet._watch._pool.shutdown()


def states(fleet: Fleet) -> list[str]:
    return [row.state for row in fleet.membership.rows()]


def started(fleet: Fleet, spare: SlowSource) -> None:
    assert fleet.membership.add(1) == [1]
    spare.may_start.set()
    wait_until(lambda: states(fleet)[1] == "ready, joins with the next update")


def test_an_engine_joins_with_an_update_and_serves_after_it(make: Make) -> None:
    fleet, cluster, spare = make()
    assert states(fleet) == ["serving", "free", "free"] and fleet.metrics() == {} and fleet.answering() == 1
    assert fleet.membership.add(1) == [1] and states(fleet) == ["serving", "starting", "free"]
    fleet.membership.begin_update()  # has not started: this update is none of its own
    spare.may_start.set()
    wait_until(lambda: states(fleet)[1] == "ready, joins with the next update")
    assert len(fleet.endpoints_of()) == 1 and fleet.launches_of() == 1
    fleet.membership.begin_update()  # the same update, begun again
    assert len(fleet.endpoints_of()) == 1
    fleet.admit("1")
    assert cluster.routed == ["http://engine0"]
    assert ("engine 1 (http://engine1)", ("node", 101)) in fleet.processes()
    fleet.membership.begin_update()
    assert (
        len(fleet.endpoints_of()) == 2 and fleet.launches_of() == 2 and cluster.routed == ["http://engine0"]
    )
    cluster.versions = {"http://engine0": "2", "http://engine1": "2"}
    fleet.admit("2")
    assert cluster.routed == ["http://engine0", "http://engine1"] and (1, "2") in cluster.told
    assert states(fleet) == ["serving", "serving", "free"]
    assert fleet.metrics()["fleet/default/engines"] == fleet.answering() == engine_count.now(0) == 2
    assert not fleet.models["default"].engines[1].joins


def test_one_that_was_not_given_the_weights_ends_the_run_and_is_not_routed_to(make: Make) -> None:
    fleet, cluster, spare = make()
    started(fleet, spare)
    fleet.membership.begin_update()
    cluster.versions = {"http://engine0": "2"}
    with pytest.raises(EngineFailure, match=r"engine 1 .* serves weight version '1', the trainer sent '2'"):
        fleet.admit("2")
    assert cluster.routed == ["http://engine0"]


def test_the_place_of_one_that_has_left_is_free_for_another(make: Make) -> None:
    fleet, cluster, spare = make()
    started(fleet, spare)
    fleet.membership.begin_update()
    fleet.admit("1")
    fleet.membership.drain([0], seconds=0)
    wait_until(lambda: states(fleet) == ["free", "serving", "free"])
    assert fleet.membership.add(2) == [0, 2]
    wait_until(lambda: len(fleet.membership.waiting) == 2)
    fleet.membership.begin_update()
    fleet.admit("1")
    assert [one.rank for one in fleet.models["default"].engines if one.lives] == [0, 1, 2]
    assert cluster.routed == ["http://engine1", "http://engine0", "http://engine2"]


@pytest.mark.parametrize("fault_tolerant", [False, True])
def test_one_that_ends_while_it_starts_costs_itself_alone(make: Make, fault_tolerant: bool, caplog) -> None:
    fleet, cluster, spare = make(fault_tolerant)
    spare.reason = "no room on the GPU"
    spare.may_start.set()
    assert fleet.membership.add(2) == [1, 2]
    wait_until(lambda: states(fleet) == ["serving", "free", "free"])
    assert sorted(cluster.stopped) == [1, 2] and "engine 2 does not join the run: no room on" in caplog.text
    fleet.check()


@pytest.mark.parametrize("fault_tolerant", [False, True])
def test_one_that_has_ended_before_its_update_does_not_take_part(make: Make, fault_tolerant: bool) -> None:
    fleet, cluster, spare = make(fault_tolerant)
    started(fleet, spare)
    cluster.ended[1] = "killed by SIGKILL"
    fleet.membership.begin_update()
    assert len(fleet.endpoints_of()) == 1
    wait_until(lambda: states(fleet) == ["serving", "free", "free"])
    assert cluster.stopped == [1]


@pytest.mark.parametrize("fault_tolerant", [False, True])
def test_one_that_ends_in_its_first_update_costs_itself_alone(make: Make, fault_tolerant: bool) -> None:
    fleet, cluster, spare = make(fault_tolerant)
    started(fleet, spare)
    fleet.membership.begin_update()
    assert fleet.tolerates and len(fleet.endpoints_of()) == 2
    cluster.ended[1] = "killed by SIGKILL"
    fleet.recover(60.0)
    assert len(fleet.endpoints_of()) == 1 and states(fleet) == ["serving", "free", "free"]
    assert fleet.tolerates == fault_tolerant and fleet.models["default"].replaced == 0
    fleet.admit("1")
    assert cluster.routed == ["http://engine0"]


def test_one_that_ends_when_it_is_asked_for_its_version_costs_itself_alone(make: Make) -> None:
    fleet, cluster, spare = make()
    started(fleet, spare)
    fleet.membership.begin_update()
    cluster.dead.add("http://engine1")
    fleet.admit("1")
    assert fleet.models["default"].engines[1].state is EngineState.DEAD
    fleet.check()


def test_one_that_ends_when_the_router_is_told_of_it_costs_itself_alone(make: Make) -> None:
    fleet, cluster, spare = make()
    started(fleet, spare)
    fleet.membership.begin_update()
    cluster.on_register = lambda url: cluster.__dict__.update(router_ended="refused", ended={1: "killed"})
    fleet.admit("1")
    cluster.router_ended = None
    assert fleet.models["default"].engines[1].state is EngineState.DEAD and cluster.routed == [
        "http://engine0"
    ]


def test_one_that_ends_before_the_router_lists_it_costs_itself_alone(make: Make) -> None:
    fleet, cluster, spare = make()
    started(fleet, spare)
    fleet.membership.begin_update()
    cluster.on_register = lambda url: cluster.ended.update({1: "killed"})
    fleet.admit("1")
    assert fleet.models["default"].engines[1].state is EngineState.DEAD
    assert cluster.routed == ["http://engine0"]
    fleet.check()


def test_the_others_are_lost_as_ever_without_fault_tolerance(make: Make) -> None:
    fleet, cluster, spare = make()
    started(fleet, spare)
    fleet.membership.begin_update()
    cluster.ended[0] = "killed by SIGKILL"
    with pytest.raises(EngineFailure, match=r"engine 0 .* ended: killed by SIGKILL"):
        fleet.recover(60.0)


def test_a_model_that_takes_no_updates_has_it_serve_at_once(make: Make) -> None:
    fleet, cluster, spare = make(takes_updates=False)
    assert fleet.membership.add(1) == [1]
    spare.may_start.set()
    wait_until(lambda: states(fleet) == ["serving", "serving", "free"])
    assert cluster.routed == ["http://engine0", "http://engine1"]


def test_a_fleet_that_stops_ends_those_that_start(make: Make) -> None:
    fleet, cluster, _ = make()
    fleet.membership.add(2)
    fleet.stop()
    assert sorted(cluster.stopped) == [0, 1, 2]
    with pytest.raises(MembershipError, match="the run is ending"):
        fleet.membership.add(1)


def test_what_cannot_be_is_refused_by_name_and_starts_nothing(make: Make) -> None:
    fleet, _, _ = make()

    def refused(count: int, name: str, why: str) -> None:
        with pytest.raises(MembershipError, match=re.escape(why)):
            fleet.membership.add(count, name)

    wanted = "(wanted: more --rollout-spare-gpus, or a drain before)"
    refused(3, "", f"3 more of model default: 2 of its places are free {wanted}")
    fleet.membership.add(1)
    refused(2, "default", f"2 more of model default: 1 of its places are free {wanted}")
    refused(1, "judge", "model judge: none is served (wanted: default)")
    assert states(fleet) == ["serving", "starting", "free"]


def test_no_engine_joins_on_the_trainers_gpus(make: Make) -> None:
    fleet, cluster, _ = make()
    cluster.colocated = True
    fleet.models["default"].engines[0]._endpoint = cluster.endpoint(0)
    with pytest.raises(
        MembershipError, match=r"model default is on GPUs of the trainer .* without --colocate"
    ):
        fleet.membership.add(1)
