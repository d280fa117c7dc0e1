"""Engines leave a fleet at request, with stand-ins for the processes."""

import re
import threading
import time
from collections.abc import Iterator

import pytest

from slime.ray import engine, membership
from slime.ray.engine import EngineState, MembershipError
from slime.ray.membership import Membership
from slime.ray.served_model import ServedModel
from tests.each import hold_each
from tests.ray.stand_ins import Cluster, client_class, wait_until

URL = "http://engine{}"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()
    monkeypatch.setattr(engine, "EngineClient", client_class(made))
    monkeypatch.setattr(membership, "_LOOK_AGAIN", 0.01)
    yield made


def serving(cluster: Cluster, places: int = 2, name: str = "default", first_rank: int = 0) -> ServedModel:
    model = cluster.model(places, name, first_rank)
    model.launch()
    model.wait_ready(60)
    for one in model.engines:
        model.admit(one)
    return model


def states(members: Membership) -> dict[int, str]:
    return {row.rank: row.state for row in members.rows()}


def test_an_engine_leaves_once_it_has_answered_and_its_place_is_free(cluster: Cluster) -> None:
    model = serving(cluster, 3)
    members = Membership({"default": model})
    cluster.loads[URL.format(1)] = 2
    members.drain([1], seconds=600)
    wait_until(lambda: cluster.requests.count((URL.format(1), "loads")) > 3)
    assert cluster.routed == [URL.format(0), URL.format(2)] and cluster.stopped == []
    assert states(members) == {0: "serving", 1: "draining", 2: "serving"}
    assert [one.rank for one in model.living] == [0, 2] and model.dead == []
    assert [one.rank for one in members.leaving] == [1]
    assert model.counts() == {"engines": 2, "missing": 0, "replaced": 0}
    cluster.loads.clear()
    wait_until(lambda: states(members) == {0: "serving", 1: "free", 2: "serving"})
    assert cluster.stopped == [1] and members.leaving == [] and model.replace_gone() == []
    assert model.has_changed and model.counts() == {"engines": 2, "missing": 0, "replaced": 0}


def test_the_metrics_pages_are_those_of_routers_and_of_engines_that_have_not_died(cluster: Cluster) -> None:
    first, second = serving(cluster, 2), serving(cluster, 2, "judge", first_rank=2)
    members = Membership({"default": first, "judge": second})
    first.engines[1].become(EngineState.DEAD)
    second.engines[0].become(EngineState.DRAINING)
    assert second.router is not None
    second.router.metrics_url = None  # somebody else's
    assert [(page.url, dict(page.labels)) for page in members.metrics_pages()] == [
        ("http://router:9/metrics", {"model": "default", "router": "router"}),
        ("http://engine0/metrics", {"model": "default", "engine": "0"}),
        ("http://engine2/metrics", {"model": "judge", "engine": "2"}),
        ("http://engine3/metrics", {"model": "judge", "engine": "3"}),
    ]
    late = cluster.model(1, "late", 4)  # whose engines have not begun to start
    assert Membership({"late": late}).metrics_pages() == []


def test_its_requests_have_so_many_seconds_and_a_dead_one_has_none(cluster: Cluster) -> None:
    members = Membership({"default": serving(cluster, 3)})
    cluster.loads = {URL.format(0): 1, URL.format(1): 1}
    cluster.dead.add(URL.format(1))
    cluster.ended[1] = "killed"
    members.drain([1], seconds=600)
    members.drain([0], seconds=0.05)
    wait_until(lambda: states(members) == {0: "free", 1: "free", 2: "serving"})


def test_who_gives_no_answer_may_have_requests(cluster: Cluster) -> None:
    members = Membership({"default": serving(cluster, 2)})
    cluster.dead.add(URL.format(1))
    members.drain([1], seconds=600)
    never = threading.Event()
    assert not never.wait(0.3) and states(members)[1] == "draining"
    members.stop()
    members.await_end()
    assert states(members)[1] == "free"


def test_who_gives_no_answer_for_too_long_is_ended_and_who_answers_is_waited_for(cluster: Cluster) -> None:
    members = Membership({"default": serving(cluster, 3)}, silence=0.2)
    cluster.loads = {URL.format(1): 1}
    cluster.dead |= {URL.format(0)}
    members.drain([0, 1], seconds=600)
    wait_until(lambda: states(members)[0] == "free")
    assert states(members) == {0: "free", 1: "draining", 2: "serving"}
    members.stop()
    members.await_end()


def test_within_an_update_nobody_leaves_and_who_is_leaving_has_at_its_begin(cluster: Cluster) -> None:
    members = Membership({"default": serving(cluster, 3)})
    cluster.loads = {URL.format(0): 1, URL.format(1): 1}
    members.drain([1], seconds=600)
    members.begin_update()
    assert cluster.stopped == [1] and states(members)[1] == "free"
    members.drain([0], seconds=600)
    assert states(members)[0] == "serving, drains after the update" and URL.format(0) in cluster.routed
    with pytest.raises(MembershipError, match=r"engine 0 .* is drained already"):
        members.drain([0], seconds=600)
    members.end_update()
    wait_until(lambda: cluster.routed == [URL.format(2)])
    assert states(members)[0] == "draining"
    members.stop()
    members.await_end()
    assert cluster.stopped == [1, 0]


def test_one_that_does_not_end_is_told_by_name(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    model = serving(cluster)
    members, never = Membership({"default": model}), threading.Event()
    monkeypatch.setattr(membership, "END_TIMEOUT", 0.1)
    monkeypatch.setattr(model.engines[1].handle, "end", lambda: never.wait(60))
    members.drain([1], seconds=0)
    with pytest.raises(TimeoutError, match=r"engine 1 .* was drained and has not ended after"):
        members.begin_update()
    never.set()


def test_one_that_died_in_the_update_is_replaced_and_its_successor_leaves(cluster: Cluster) -> None:
    model = serving(cluster, 2)
    members = Membership({"default": model})
    members.begin_update()
    members.drain([1], seconds=0)
    model.engines[1].become(EngineState.DEAD)
    model.engines[1].end()
    (fresh,) = model.replace_gone()
    model.wait_ready(60)
    model.admit(fresh)
    members.end_update()
    wait_until(lambda: states(members) == {0: "serving", 1: "free"})
    assert model.replaced == 1


def test_who_would_be_the_last_stays_though_another_one_died_in_the_update(cluster: Cluster, caplog) -> None:
    model = serving(cluster, 2)
    members = Membership({"default": model})
    members.begin_update()
    members.drain([0], seconds=0)
    model.engines[1].become(EngineState.DEAD)
    members.end_update()
    assert "engine 0 is not drained: engine 0 is the last of model default that serves" in caplog.text
    assert states(members) == {0: "serving", 1: "dead"}


def test_it_leaves_though_its_router_has_ended(cluster: Cluster) -> None:
    members = Membership({"default": serving(cluster)})
    cluster.router_fails = True
    cluster.loads = {URL.format(1): 1}
    members.drain([1], seconds=600)
    wait_until(lambda: states(members)[1] == "free")


def test_who_has_a_notice_leaves_in_time_and_its_place_is_not_filled_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = serving(cluster, 3)
    members, now = Membership({"default": model}), time.monotonic()
    cluster.loads = {URL.format(1): 1}
    members.drain([1], seconds=600, notice=membership._BEFORE_NOTICE + 0.2)
    wait_until(lambda: states(members)[1] == "free when its notice ends")
    with pytest.raises(MembershipError, match="0 of its places are free"):
        members.add(1)
    monkeypatch.setattr(membership.time, "monotonic", lambda: now + 600)
    assert states(members)[1] == "free" and members.add(1) == [1]


def test_one_that_dies_before_it_could_leave_is_replaced_after_its_notice(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = serving(cluster, 2)
    members, now = Membership({"default": model}), time.monotonic()
    members.begin_update()
    members.drain([1], seconds=0, notice=300)
    model.engines[1].become(EngineState.DEAD)
    model.engines[1].end()
    assert model.replace_gone() == []
    members.end_update()
    monkeypatch.setattr(membership.time, "monotonic", lambda: now + 600)
    members.begin_update()
    assert [one.rank for one in model.replace_gone()] == [1]


def test_what_cannot_be_is_refused_by_name_and_changes_nothing(cluster: Cluster) -> None:
    judge = serving(cluster, 1, "judge", first_rank=3)
    model = serving(cluster, 3)
    model.engines[2].become(EngineState.DEAD)
    model.engines[1].kind = "decode"
    members = Membership({"default": model, "judge": judge})

    def refused(ranks: list[int], why: str) -> None:
        with pytest.raises(MembershipError, match=re.escape(why)):
            members.drain(ranks, seconds=1)

    rows = [
        ([7], "engine 7: there is none of that number (wanted: one of 0, 1, 2, 3)"),
        ([0, 2], "engine 2 (http://engine2) is dead (wanted: one that is serving)"),
        ([1], "engine 1 (http://engine1) is a decode engine (wanted: a regular one)"),
        ([3], "engine 3 is the last of model judge that serves"),
    ]
    hold_each(rows, lambda row: refused(*row))
    assert cluster.stopped == [] and states(members) == {0: "serving", 1: "serving", 2: "dead", 3: "serving"}
    members = Membership({"default": model, "judge": judge}, refusal="somebody else's")
    refused([0], "somebody else's")
    members.stop()
    refused([0], "the run is ending")


def test_both_of_two_are_refused(cluster: Cluster) -> None:
    members = Membership({"default": serving(cluster)})
    with pytest.raises(MembershipError, match="engine 1 is the last of model default"):
        members.drain([0, 1], seconds=1)
    members.begin_update()
    members.drain([0], seconds=1)
    with pytest.raises(MembershipError, match="engine 1 is the last of model default"):
        members.drain([1], seconds=1)


def test_on_the_trainers_gpus_nothing_would_become_free(cluster: Cluster) -> None:
    cluster.colocated = True
    members = Membership({"default": serving(cluster)})
    with pytest.raises(MembershipError, match=r"is on GPUs of the trainer, .* without --colocate"):
        members.drain([0], seconds=1)


def test_an_engine_that_leaves_while_the_router_starts_again_is_not_listed_there(cluster: Cluster) -> None:
    model = cluster.model(2, router_restarts=1)
    model.launch()
    model.wait_ready(60)
    for one in model.engines:
        model.admit(one)
    members = Membership({"default": model})

    def leave(url: str) -> None:
        assert url != URL.format(1) or model.engines[1].become(EngineState.DRAINING)

    cluster.on_register, cluster.router_ended = leave, "killed"
    assert model.restart_router(model.router) and cluster.routed == [URL.format(0)]
    assert states(members)[1] == "draining"
