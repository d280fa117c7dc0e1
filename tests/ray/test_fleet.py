"""The fleet's decisions about engines that die, with stand-ins for the processes."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime.backends.sglang_utils.client import EngineError
from slime.backends.sglang_utils.router import RouterError
from slime.backends.sglang_utils.server_engine import EngineStartError
from slime.ray import engine, engine_watch, spawned_engines
from slime.ray.addresses import api_key, metrics_port
from slime.ray.engine import EngineState
from slime.ray.engine_group import EngineGroup
from slime.ray.engine_watch import EngineFailure
from slime.ray.fleet import Fleet
from slime.ray.served_model import ServedModel
from slime.ray.spawned_engines import SpawnedEngine
from slime.ray.waiting import ProcessDied
from slime.utils.types import EngineEndpoint
from tests.engines.fake import FakeEngine
from tests.ray.stand_ins import Cluster, Router, Source, client_class, wait_until
from tests.run_args import config_with


class Call:
    """A method of a stand-in for an engine actor; what it returns stands for the reference to its answer."""

    def __init__(self, actor: "FakeEngineActor") -> None:
        self.actor = actor

    def remote(self, *arguments: Any) -> "FakeEngineActor":
        return self.actor


class FakeEngineActor:
    lost = False

    def __getattr__(self, method: str) -> Call:
        return Call(self)


class KeptSource(Source):
    """Engines with actors that can be lost."""

    def launch(self, place: int, rank: int) -> Any:
        return SpawnedEngine(rank, [FakeEngineActor()])


def answer(actor: FakeEngineActor, what: str, timeout: float, meanwhile: object = None) -> None:
    if actor.lost:
        raise ProcessDied(f"{what}: the process of rank 0 ended")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    def build(
        colocated: bool = False,
        fault_tolerant: bool = True,
        models: Callable[[Cluster], list[ServedModel]] = lambda cluster: [kept_model(cluster)],
        look_interval: float = 0.01,
    ) -> tuple[Fleet, Cluster]:
        cluster = Cluster(colocated)
        monkeypatch.setattr(engine, "EngineClient", client_class(cluster))
        monkeypatch.setattr(spawned_engines, "wait_one", answer)
        monkeypatch.setattr(spawned_engines.ray, "kill", lambda actor: None)
        monkeypatch.setattr(engine_watch, "LOOK_INTERVAL", look_interval)
        config = config_with(
            use_fault_tolerance=fault_tolerant,
            offload_rollout=colocated,
            rollout_health_check_interval=60.0,
            rollout_health_check_timeout=1.0,
            rollout_health_check_first_wait=0.0,
            rollout_engine_hang_timeout=300.0,
        )
        fleet = Fleet(config, models(cluster))
        fleets.append(fleet)
        fleet.start()
        return fleet, cluster

    fleets: list[Fleet] = []
    yield build
    for fleet in fleets:
        fleet.stop()
        fleet._watch._pool.shutdown()


def kept_model(cluster: Cluster) -> ServedModel:
    return ServedModel("default", [EngineGroup(KeptSource(cluster, 2))], lambda: Router(cluster))


def lose_actor(fleet: Fleet, rank: int = 0) -> None:
    fleet.models["default"].engines[rank].handle.actors[0].lost = True


def living(fleet: Fleet) -> list[int]:
    return [one.rank for model in fleet.models.values() for one in model.living]


def failed(fleet: Fleet) -> bool:
    try:
        fleet.check()
    except EngineFailure:
        return True
    return False


def test_an_engine_whose_actor_is_gone_leaves_the_router(make) -> None:
    fleet, cluster = make()
    lose_actor(fleet)
    wait_until(lambda: cluster.routed == ["http://engine1"])
    fleet.check()


def test_without_fault_tolerance_a_lost_actor_ends_the_run(make) -> None:
    fleet, _ = make(fault_tolerant=False)
    lose_actor(fleet)
    wait_until(lambda: failed(fleet))
    with pytest.raises(EngineFailure, match=r"engine 0 .* ended: its engine actor is gone"):
        fleet.check()


def test_stopping_goes_on_after_an_actor_that_is_gone(make) -> None:
    fleet, cluster = make(fault_tolerant=False)
    lose_actor(fleet)
    fleet.stop()
    assert ("router", "shutdown") in cluster.requests


def test_a_router_that_keeps_a_dead_engine_ends_the_run(make) -> None:
    fleet, cluster = make()
    cluster.router_fails = True
    lose_actor(fleet)
    wait_until(lambda: failed(fleet))
    with pytest.raises(EngineFailure, match=r"engine 0 .* the router is gone"):
        fleet.check()


def test_an_error_of_the_watcher_itself_ends_the_run(make, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = make()
    monkeypatch.setattr(SpawnedEngine, "failure_reason", lambda self: 1 / 0)
    wait_until(lambda: failed(fleet))
    with pytest.raises(EngineFailure, match="ZeroDivisionError"):
        fleet.check()


def test_a_replacement_at_the_same_address_counts_as_a_launch(make) -> None:
    fleet, _ = make()
    before, launches = fleet.endpoints_of(), fleet.launches_of()
    lose_actor(fleet)
    wait_until(lambda: living(fleet) == [1])
    fleet.recover()
    assert fleet.endpoints_of() == before
    assert fleet.launches_of() == launches + 1


def test_recovery_finds_a_death_that_the_watcher_has_not_seen(make) -> None:
    fleet, _ = make(look_interval=60.0)
    lost = fleet.models["default"].engines[0]
    lose_actor(fleet)
    fleet.recover()
    assert lost.state is EngineState.DEAD and lost not in fleet.models["default"].engines
    assert living(fleet) == [0, 1]


def test_a_replacement_serves_only_once_it_has_current_weights(make) -> None:
    fleet, cluster = make()
    lose_actor(fleet)
    wait_until(lambda: cluster.routed == ["http://engine1"])
    fleet.recover()
    assert cluster.routed == ["http://engine1"]
    cluster.versions = {"http://engine0": "default", "http://engine1": "2"}
    with pytest.raises(EngineFailure, match=r"engine 0 .*'default'.*'2'"):
        fleet.admit("2")
    assert cluster.routed == ["http://engine1"]
    cluster.versions["http://engine0"] = "2"
    fleet.admit("2")
    assert sorted(cluster.routed) == ["http://engine0", "http://engine1"]


def test_a_colocated_replacement_can_be_onloaded_like_the_others(make) -> None:
    fleet, cluster = make(colocated=True)
    lose_actor(fleet)
    wait_until(lambda: living(fleet) == [1])
    fleet.recover()
    assert cluster.requests == [("http://engine0", "release"), ("http://engine0", "resume weights")]


@pytest.mark.parametrize("method", ["release", "resume", "admit"])
def test_an_engine_found_dead_by_a_request_is_left_to_recovery(method: str, make) -> None:
    fleet, cluster = make(colocated=True)
    cluster.dead.add("http://engine0")
    arguments: dict[str, list[Any]] = {"release": [], "resume": [["weights"]], "admit": ["1"]}
    getattr(fleet, method)(*arguments[method])
    assert living(fleet) == [1]
    assert cluster.routed == ["http://engine1"]


def test_without_fault_tolerance_a_dead_engine_fails_the_request(make) -> None:
    fleet, cluster = make(colocated=True, fault_tolerant=False)
    cluster.dead.add("http://engine0")
    with pytest.raises(EngineError, match="engine0"):
        fleet.release()


def test_a_request_to_an_engine_whose_process_has_ended_tells_its_end(make) -> None:
    fleet, cluster = make(colocated=True, fault_tolerant=False, look_interval=600)
    cluster.dead.add("http://engine0")
    lose_actor(fleet)
    with pytest.raises(EngineFailure, match=r"ended: .*the process of rank 0 ended"):
        fleet.release()


def test_a_death_that_is_suspected_is_waited_for(make) -> None:
    fleet, _ = make(look_interval=60.0)
    launches = fleet.launches_of()
    fleet.recover()
    assert fleet.launches_of() == launches
    threading.Timer(0.5, lose_actor, [fleet]).start()
    fleet.recover(timeout=60)
    assert fleet.launches_of() == launches + 1 and living(fleet) == [0, 1]


def test_a_suspicion_that_proves_wrong_is_given_up(make) -> None:
    fleet, _ = make()
    launches, started = fleet.launches_of(), time.monotonic()
    fleet.recover(timeout=0.3)
    assert time.monotonic() - started >= 0.3
    assert fleet.launches_of() == launches


def test_the_last_engine_may_die_while_another_starts(make, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = make()
    lose_actor(fleet, 0)
    wait_until(lambda: living(fleet) == [1])
    started, wait_ready = threading.Event(), KeptSource.wait_ready
    slow = lambda *arguments: [started.wait(120), wait_ready(*arguments)][1]
    monkeypatch.setattr(KeptSource, "wait_ready", slow)
    recovery = threading.Thread(target=fleet.recover)
    recovery.start()
    wait_until(lambda: fleet.launches_of() == 3)
    lose_actor(fleet, 1)
    wait_until(lambda: living(fleet) == [])
    started.set()
    recovery.join(60)
    fleet.check()
    assert living(fleet) == [0]
    fleet.recover()
    assert living(fleet) == [0, 1]


@pytest.mark.parametrize("dies", [True, False])
def test_a_refusal_is_an_error_unless_the_engine_has_died(make, monkeypatch, dies: bool) -> None:
    fleet, _ = make(colocated=True)
    victim = fleet.models["default"].engines[0]

    def refuse() -> None:
        if dies:
            victim.become(EngineState.DEAD)
        raise EngineError(victim.url, "/release_memory_occupation", 503, "shutting down")

    monkeypatch.setattr(victim.client, "release_memory_occupation", refuse)
    if dies:
        fleet.release()
    else:
        with pytest.raises(EngineError, match="HTTP 503"):
            fleet.release()


class FakeEngines(Source):
    """Two engines that answer over HTTP; the first one is stopped, as by SIGSTOP: its system takes the
    connections, and nobody answers.
    """

    def __init__(self, cluster: Cluster, urls: list[str]) -> None:
        super().__init__(cluster, len(urls))
        self.urls = urls

    def wait_ready(self, handles: Any, timeout: float) -> list[EngineEndpoint]:
        return [EngineEndpoint(self.urls[handle.rank], None, 1, gpu_offset=handle.rank) for handle in handles]


@pytest.fixture
def stopped_engine() -> Iterator[list[str]]:
    """The addresses of one that is stopped and of one that is not."""
    other = FakeEngine().start()
    other.answers |= {"release_memory_occupation": {}, "resume_memory_occupation": {}}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield [f"http://127.0.0.1:{listener.getsockname()[1]}", other.url]
    other.stop()


@pytest.mark.parametrize("request_of", [Fleet.release, lambda fleet: fleet.resume(["kv_cache"])])
@pytest.mark.parametrize("tolerant", [True, False])
def test_an_engine_that_is_stopped_in_an_offload_is_found_by_its_hang_timeout(
    make, stopped_engine: list[str], request_of: Any, tolerant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.EngineClient
    group = lambda cluster: EngineGroup(FakeEngines(cluster, stopped_engine), answer_timeout=0.5)
    models = lambda cluster: [ServedModel("default", [group(cluster)], lambda: Router(cluster))]
    fleet, _ = make(colocated=True, fault_tolerant=tolerant, models=models)
    monkeypatch.setattr(engine, "EngineClient", real)
    if tolerant:
        request_of(fleet)
        assert living(fleet) == [1]
    else:
        with pytest.raises(EngineError, match=f"{stopped_engine[0]}.*no answer: ReadTimeout"):
            request_of(fleet)


def test_a_replacement_waits_until_the_dead_engine_has_ended(make, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = make()
    ending, launches = threading.Event(), fleet.launches_of()
    monkeypatch.setattr(SpawnedEngine, "end", lambda self: ending.wait(120))
    lose_actor(fleet)
    wait_until(lambda: living(fleet) == [1])
    recovery = threading.Thread(target=fleet.recover)
    recovery.start()
    recovery.join(0.3)
    assert recovery.is_alive() and fleet.launches_of() == launches
    ending.set()
    recovery.join(60)
    assert fleet.launches_of() == launches + 1


def with_a_judge(cluster: Cluster) -> list[ServedModel]:
    return [cluster.model(2), cluster.model(2, "judge", first_rank=2, takes_updates=False)]


def test_only_models_that_take_updates_are_updated(make) -> None:
    fleet, cluster = make(models=with_a_judge)
    assert living(fleet) == [0, 1, 2, 3] and len(cluster.routed) == 4
    assert [endpoint.url for endpoint in fleet.endpoints_of()] == ["http://engine0", "http://engine1"]
    assert fleet.launches_of() == 2
    fleet.admit("1")
    assert cluster.requests == [(f"http://engine{rank}", "weight_version") for rank in (0, 1)]


def test_an_update_of_one_of_several_policies_reaches_its_engines_alone(make) -> None:
    policies = lambda cluster: [cluster.model(2, "a"), cluster.model(1, "b", first_rank=2)]
    fleet, cluster = make(models=policies)
    assert [endpoint.url for endpoint in fleet.endpoints_of("a")] == ["http://engine0", "http://engine1"]
    assert [endpoint.url for endpoint in fleet.endpoints_of("b")] == ["http://engine2"]
    assert (fleet.launches_of("a"), fleet.launches_of("b")) == (2, 1)
    fleet.admit("1", "b")
    assert cluster.requests == [("http://engine2", "weight_version")]


def with_its_past(cluster: Cluster) -> list[ServedModel]:
    past = cluster.model(2, "past", first_rank=1, update_interval=2, waits_for_weights=True)
    return [cluster.model(1), past]


def test_a_model_keeps_an_earlier_version_for_so_many_rollouts(make) -> None:
    fleet, cluster = make(models=with_its_past)
    assert cluster.routed == ["http://engine0"]  # the others have nobody's weights yet
    updated = []
    for rollout_id in range(3, 7):
        version = str(rollout_id + 1)
        cluster.versions = {f"http://engine{rank}": version for rank in range(3)}
        updated.append([endpoint.url for endpoint in fleet.endpoints_of()])
        assert updated[-1] == [endpoint.url for endpoint in fleet.endpoints_of()]  # begun again: the same
        fleet.admit(version)
        fleet.begin_rollout(rollout_id)
        assert fleet.metrics()["fleet/past/weight_version"] == {3: 4, 4: 5, 5: 5, 6: 7}[rollout_id]
    everybody = [f"http://engine{rank}" for rank in range(3)]
    assert updated == [everybody, everybody, everybody[:1], everybody]
    assert sorted(cluster.routed) == everybody
    assert "fleet/default/weight_version" not in fleet.metrics()


def test_a_model_that_has_lost_an_engine_takes_the_next_version_as_a_whole(make) -> None:
    fleet, cluster = make(models=with_its_past)
    cluster.versions = {f"http://engine{rank}": "1" for rank in range(3)}
    fleet.admit("1")
    fleet.begin_rollout(0)
    assert len(fleet.endpoints_of()) == 1
    cluster.ended[2] = "killed by SIGKILL"
    wait_until(lambda: fleet.models["past"].dead)
    fleet.recover()
    assert len(fleet.endpoints_of()) == 3  # there is no copy of what the other one has
    fleet.begin_rollout(1)
    assert fleet.models["past"].version == "1"


def test_a_model_that_evaluates_takes_the_weights_of_evaluations_alone(make) -> None:
    judged = lambda cluster: cluster.model(2, "judged", first_rank=1, evaluates=True, waits_for_weights=True)
    fleet, cluster = make(models=lambda cluster: [cluster.model(1), judged(cluster)])
    everybody, model = [f"http://engine{rank}" for rank in range(3)], fleet.models["judged"]
    cluster.versions = dict.fromkeys(everybody, "1")
    assert [endpoint.url for endpoint in fleet.endpoints_of()] == everybody
    fleet.admit("1")
    fleet.begin_rollout(0)
    assert len(fleet.endpoints_of()) == 1
    # Its dead wait, a whole model of them, too: others have weights that the evaluation is not of.
    for rank in (1, 2):
        cluster.ended[rank] = "killed by SIGKILL"
    wait_until(lambda: len(model.dead) == 2)
    with fleet.serving():
        pass
    fleet.recover()
    assert len(fleet.endpoints_of()) == 1
    fleet.begin_rollout(1)
    assert cluster.routed == ["http://engine0"]
    model.wanted, cluster.versions = True, dict.fromkeys(everybody, "3")
    assert len(fleet.endpoints_of()) == 3
    fleet.admit("3")
    assert sorted(cluster.routed) == everybody
    assert fleet.metrics()["fleet/judged/weight_version"] == 3


def test_a_model_that_is_to_evaluate_needs_an_engine(make) -> None:
    judged = lambda cluster: cluster.model(1, "judged", first_rank=1, evaluates=True, waits_for_weights=True)
    fleet, cluster = make(models=lambda cluster: [cluster.model(1), judged(cluster)])
    fleet.begin_rollout(0)
    cluster.ended[1] = "killed by SIGKILL"
    wait_until(lambda: fleet.models["judged"].dead)
    cluster.taken.add(0)
    fleet.recover()
    fleet.models["judged"].wanted = True
    with pytest.raises(EngineFailure, match="model judged: no engine is left"):
        fleet.recover()


def test_a_policy_s_earlier_version_takes_that_policy_s_weights(make) -> None:
    models = lambda cluster: [
        cluster.model(1, "a"),
        cluster.model(1, "b", first_rank=1),
        cluster.model(1, "past", first_rank=2, policy="b", update_interval=2),
    ]
    fleet, _ = make(models=models)
    urls = {policy: [endpoint.url for endpoint in fleet.endpoints_of(policy)] for policy in "ab"}
    assert urls == {"a": ["http://engine0"], "b": ["http://engine1", "http://engine2"]}


def test_an_engine_that_takes_no_updates_serves_again_as_soon_as_it_has_ended(make) -> None:
    fleet, cluster = make(models=with_a_judge)
    lost = fleet.models["judge"].engines[1]
    cluster.ended[3] = "killed by SIGKILL"
    wait_until(lambda: fleet.models["judge"].engines[1].state is EngineState.SERVING)
    wait_until(lambda: fleet.models["judge"].engines[1] is not lost)
    wait_until(lambda: cluster.routed.count("http://engine3") == 1)
    assert lost.state is EngineState.DEAD and cluster.stopped == [3]
    assert (fleet.launches_of(), cluster.requests) == (2, [])  # nothing to update, nothing to connect anew
    assert fleet.metrics() == {
        "fleet/default/engines": 2,
        "fleet/default/missing": 0,
        "fleet/default/replaced": 0,
        "fleet/judge/engines": 2,
        "fleet/judge/missing": 0,
        "fleet/judge/replaced": 1,
    }


def test_a_single_model_is_counted_once_an_engine_has_died(make) -> None:
    fleet, _ = make()
    assert fleet.metrics() == {}
    lose_actor(fleet)
    wait_until(lambda: living(fleet) == [1])
    assert fleet.metrics() == {
        "fleet/default/engines": 1,
        "fleet/default/missing": 1,
        "fleet/default/replaced": 0,
    }


def test_even_the_last_engine_of_a_model_that_takes_no_updates_comes_back(make) -> None:
    fleet, cluster = make(models=with_a_judge)
    cluster.ended.update({2: "killed by SIGKILL", 3: "is stopped (SIGSTOP), for 10 s now"})
    wait_until(lambda: sorted(cluster.stopped) == [2, 3])
    wait_until(lambda: living(fleet) == [0, 1, 2, 3] and len(cluster.routed) == 4)
    fleet.check()


def test_the_last_engine_of_the_trained_model_ends_the_run_that_needs_it(make) -> None:
    fleet, cluster = make(models=with_a_judge)
    with fleet.serving():
        cluster.ended.update({0: "killed by SIGKILL", 1: "killed by SIGKILL"})
        wait_until(lambda: failed(fleet))
    with pytest.raises(EngineFailure, match="no engine is left"):
        fleet.check()


def test_all_engines_are_replaced_that_died_before_a_weight_update(make) -> None:
    fleet, cluster = make(models=with_a_judge)
    cluster.ended.update({0: "killed by SIGKILL", 1: "killed by SIGKILL"})
    wait_until(lambda: living(fleet) == [2, 3])
    fleet.recover()
    fleet.admit("1")
    with fleet.serving():
        assert living(fleet) == [0, 1, 2, 3] and len(cluster.routed) == 4


def test_a_rollout_does_not_begin_without_an_engine_of_the_trained_model(make) -> None:
    fleet, cluster = make(models=with_a_judge)
    cluster.ended.update({0: "killed by SIGKILL", 1: "killed by SIGKILL"})
    wait_until(lambda: living(fleet) == [2, 3])
    with pytest.raises(EngineFailure, match="model default: no engine is left"), fleet.serving():
        pass


def test_places_that_cannot_be_filled_end_the_run_once_all_are_empty(make) -> None:
    fleet, cluster = make(models=lambda cluster: [cluster.model(2)])
    cluster.taken.update((0, 1))
    for rank in (0, 1):
        cluster.ended[rank] = "it no longer answers"
    wait_until(lambda: living(fleet) == [])
    with pytest.raises(EngineFailure, match="model default: no engine is left"):
        fleet.recover()


def test_an_engine_that_hung_in_an_update_is_replaced(make) -> None:
    """Nothing is found by looking at processes; those that are well are left alone."""
    fleet, cluster = make()
    cluster.sick["http://engine0"] = False
    fleet.recover()
    assert fleet.launches_of() == 2 and cluster.checked == []
    fleet.recover(timeout=0.05)
    assert fleet.launches_of() == 3 and living(fleet) == [0, 1]
    assert sorted(cluster.checked) == ["http://engine0", "http://engine1"]
    del cluster.sick["http://engine0"]
    fleet.recover(timeout=0.05)
    assert fleet.launches_of() == 3


class EndingAtStart(Source):
    """Engines of which the first so many replacements end while they start."""

    failures = 2

    def __len__(self) -> int:
        return 2

    def launch(self, place: int, rank: int) -> Any:
        handle = super().launch(place, rank)
        self.launched = getattr(self, "launched", 0) + 1
        if 0 <= self.launched - len(self) - 1 < self.failures:
            self.cluster.ended[rank] = "out of memory"
        return handle

    def wait_ready(self, handles: Any, timeout: float) -> Any:
        for handle in handles:
            if reason := handle.failure_reason():
                raise EngineStartError(f"engine {handle.rank}: {reason}")
        return super().wait_ready(handles, timeout)


def of_ending_at_start(cluster: Cluster) -> list[ServedModel]:
    return [ServedModel("default", [EngineGroup(EndingAtStart(cluster, 2))], lambda: Router(cluster))]


def test_a_replacement_that_ends_while_it_starts_is_replaced(make, caplog) -> None:
    fleet, cluster = make(models=of_ending_at_start)
    cluster.ended[0] = "killed by SIGKILL"
    wait_until(lambda: living(fleet) == [1])
    fleet.recover()
    assert living(fleet) == [0, 1] and fleet.launches_of() == 5
    assert cluster.stopped == [0, 0, 0]
    assert caplog.text.count("engine 0 ended while it started, and is started again: out of memory") == 2


def test_replacements_that_end_again_and_again_end_the_run_by_name(make, monkeypatch) -> None:
    monkeypatch.setattr(EndingAtStart, "failures", 100)
    fleet, cluster = make(models=of_ending_at_start)
    cluster.ended[0] = "killed by SIGKILL"
    wait_until(lambda: living(fleet) == [1])
    told = "engine 0: 4 replacements in a row ended while they started: out of memory"
    with pytest.raises(EngineFailure, match=told):
        fleet.recover()


def test_replacements_that_do_not_start_in_time_end_the_run(make, monkeypatch) -> None:
    fleet, cluster = make(models=of_ending_at_start)
    monkeypatch.setattr(EndingAtStart, "failures", 0)

    def late(self: Source, handles: Any, timeout: float) -> Any:
        raise EngineStartError("does not serve after 600 s")

    monkeypatch.setattr(EndingAtStart, "wait_ready", late)
    cluster.ended[0] = "killed by SIGKILL"
    wait_until(lambda: living(fleet) == [1])
    with pytest.raises(EngineStartError, match="does not serve after 600 s"):
        fleet.recover()


def struck_when_registered(cluster: Cluster, rank: int, hangs: bool = False) -> None:
    """The engine ends, or answers nothing, when a router is told of it, which refuses it therefore: once."""

    def strike(url: str) -> None:
        if url != cluster.endpoint(rank).url:
            return
        cluster.on_register = lambda url: None
        if hangs:
            cluster.sick[url] = False
        else:
            cluster.ended[rank] = "killed by SIGKILL"
        raise RouterError(f"nobody answers at {url}")

    cluster.on_register = strike


@pytest.mark.parametrize("hangs", [False, True])
def test_a_replacement_that_dies_when_the_router_is_told_of_it_is_left_to_the_next_update(
    make, hangs: bool
) -> None:
    fleet, cluster = make(models=lambda cluster: [cluster.model(2)], look_interval=600)
    for struck in (True, False):
        cluster.ended[0] = "killed by SIGKILL"
        fleet.recover()
        if struck:
            struck_when_registered(cluster, 0, hangs)
        fleet.admit("1")
        assert cluster.routed == ["http://engine1", *(() if struck else ("http://engine0",))]
        assert living(fleet) == ([1] if struck else [0, 1])
        cluster.sick.clear()
    fleet.check()


def test_a_router_that_refuses_an_engine_that_is_well_ends_the_run(make) -> None:
    fleet, cluster = make(models=lambda cluster: [cluster.model(2)], look_interval=600)
    cluster.ended[0] = "killed by SIGKILL"
    fleet.recover()
    struck_when_registered(cluster, 0)
    wake, strike = cluster.ended.clear, cluster.on_register

    def refuse(url: str) -> None:
        try:
            strike(url)
        finally:
            wake()

    cluster.on_register = refuse
    with pytest.raises(RouterError, match="nobody answers at http://engine0"):
        fleet.admit("1")


def test_an_engine_that_dies_when_the_first_router_is_told_of_it_is_replaced_by_the_first_update(
    make,
) -> None:
    def models(cluster: Cluster) -> list[ServedModel]:
        struck_when_registered(cluster, 1)
        return [cluster.model(2)]

    fleet, cluster = make(models=models, look_interval=600)
    assert living(fleet) == [0] and cluster.routed == ["http://engine0"]
    fleet.recover()
    fleet.admit("1")
    assert cluster.routed == ["http://engine0", "http://engine1"]
    with pytest.raises(RouterError, match="nobody answers at http://engine1"):
        make(models=models, fault_tolerant=False)


def test_a_frozen_replacement_that_dies_when_the_router_is_told_of_it_is_replaced_too(make) -> None:
    fleet, cluster = make(models=with_a_judge)
    struck_when_registered(cluster, 3)
    cluster.ended[3] = "killed by SIGKILL"
    wait_until(lambda: cluster.stopped == [3, 3] and "http://engine3" in cluster.routed)
    fleet.check()


def test_a_colocated_replacement_that_ends_before_it_has_released_its_memory_costs_itself_alone(make) -> None:
    fleet, cluster = make(colocated=True, look_interval=600)
    lose_actor(fleet)
    cluster.dead.add("http://engine0")
    fleet.recover()
    assert living(fleet) == [1]


def test_each_rollout_forgets_the_restarts_of_routers_before_it(make) -> None:
    models = lambda cluster: [cluster.model(2, router_restarts=1)]
    fleet, cluster = make(models=models)
    for _ in range(3):
        with fleet.serving():
            cluster.router_ended = "killed by SIGKILL"
            wait_until(lambda: cluster.router_ended is None and len(cluster.routed) == 2)
    fleet.check()


def test_a_frozen_engine_on_the_trainers_gpus_waits_for_its_turn(make) -> None:
    fleet, cluster = make(colocated=True, models=with_a_judge)
    cluster.ended[3] = "killed by SIGKILL"
    wait_until(lambda: living(fleet) == [0, 1, 2])
    wait_until(lambda: cluster.stopped == [3])
    assert fleet.models["judge"].launches == 2
    fleet.recover()
    assert living(fleet) == [0, 1, 2, 3] and "http://engine3" in cluster.routed
    assert cluster.requests == [("http://engine3", "release"), ("http://engine3", "resume weights")]


def test_a_frozen_engine_that_dies_again_and_again_ends_the_run(make) -> None:
    fleet, cluster = make(models=with_a_judge)

    def die_again(url: str) -> None:
        if url == "http://engine3":
            cluster.ended[3] = "out of memory"

    cluster.on_register = die_again
    cluster.ended[3] = "out of memory"
    wait_until(lambda: failed(fleet))
    with pytest.raises(EngineFailure, match=r"engine 3 .* died 6 times in one rollout"):
        fleet.check()
    assert cluster.stopped == [3] * 6


def test_a_frozen_engine_that_cannot_start_again_ends_the_run_by_name(make, monkeypatch) -> None:
    fleet, cluster = make(models=with_a_judge)

    def fail(self: Source, handles: Any, timeout: float) -> Any:
        raise EngineStartError("exit status 1")

    monkeypatch.setattr(Source, "wait_ready", fail)
    cluster.ended[3] = "killed by SIGKILL"
    wait_until(lambda: failed(fleet))
    with pytest.raises(EngineFailure, match=r"engine 3 .*none could take its place: exit status 1"):
        fleet.check()


def test_a_restart_under_way_when_the_fleet_stops_leaves_no_engine_behind(make, monkeypatch) -> None:
    fleet, cluster = make(models=with_a_judge)
    entered, release, wait_ready = threading.Event(), threading.Event(), Source.wait_ready

    def slow(self: Source, handles: Any, timeout: float) -> Any:
        entered.set()
        release.wait(120)
        return wait_ready(self, handles, timeout)

    monkeypatch.setattr(Source, "wait_ready", slow)
    cluster.ended[3] = "killed by SIGKILL"
    assert entered.wait(60)
    fleet.stop()
    release.set()
    assert cluster.stopped.count(3) == 2  # the dead one, and the one that was starting


def test_an_engine_of_a_later_group_is_replaced_in_its_own_place(make) -> None:
    def two_groups(cluster: Cluster) -> list[ServedModel]:
        groups = [
            EngineGroup(Source(cluster, 1)),
            EngineGroup(Source(cluster, 2), first_rank=1, kind="decode"),
        ]
        return [ServedModel("default", groups, lambda: Router(cluster))]

    fleet, cluster = make(models=two_groups)
    cluster.ended[2] = "is stopped (SIGSTOP), for 10 s now"
    wait_until(lambda: living(fleet) == [0, 1])
    fleet.recover()
    (new,) = [one for one in fleet.models["default"].engines if one.rank == 2]
    assert (new.kind, new.state) == ("decode", EngineState.READY)
    assert "http://engine2" not in cluster.routed  # before it has current weights
    cluster.versions = {f"http://engine{rank}": "5" for rank in range(3)}
    fleet.admit("5")
    assert "http://engine2" in cluster.routed
    assert sorted(cluster.told) == [(0, "5"), (1, "5"), (2, "5")]


def test_a_place_that_cannot_be_filled_yet_is_filled_later_and_hides_no_other_death(make) -> None:
    fleet, cluster = make(models=lambda cluster: [cluster.model(3)])
    cluster.taken.add(0)
    cluster.ended[0] = "it no longer answers"
    wait_until(lambda: cluster.routed == ["http://engine1", "http://engine2"])
    fleet.recover()
    assert living(fleet) == [1, 2] and fleet.launches_of() == 3
    threading.Timer(0.3, cluster.ended.update, [{1: "killed by SIGKILL"}]).start()
    fleet.recover(timeout=60)
    assert living(fleet) == [1, 2] and fleet.launches_of() == 4
    cluster.taken.clear()
    fleet.recover()
    assert living(fleet) == [0, 1, 2] and "http://engine0" not in cluster.routed
    fleet.admit("1")
    assert "http://engine0" in cluster.routed


def test_each_run_has_a_key_of_its_own_unless_one_is_given_or_engines_are_of_others() -> None:
    config = config_with()
    tokens = {api_key(config) for _ in range(2)}
    assert len(tokens) == 2 and min(len(token or "") for token in tokens) >= 32
    assert api_key(config_with(sglang_api_key="mine")) == "mine"
    assert api_key(config_with(rollout_external=True)) is None


@pytest.mark.parametrize("port", [1024, 59_999, 60_000, 65_535])
def test_the_routers_metrics_have_a_port_of_their_own(port: int) -> None:
    assert 0 < metrics_port(port) < 65_535
    assert metrics_port(port) != port


def test_the_processes_of_living_engines_are_known_by_name(make) -> None:
    fleet, cluster = make(models=with_a_judge)
    cluster.ended[1] = "killed by SIGKILL"
    wait_until(lambda: living(fleet) == [0, 2, 3])
    assert fleet.processes() == [(f"engine {n} (http://engine{n})", ("node", 100 + n)) for n in (0, 2, 3)]
