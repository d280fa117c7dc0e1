"""The fleet's decisions about engines that die, with stand-ins for the processes."""

import threading
from argparse import Namespace
from typing import Any

import pytest

from slime.backends.sglang_utils.client import EngineError
from slime.backends.sglang_utils.router import RouterError
from slime.ray import engine_fleet
from slime.ray.engine_fleet import EngineFailure, EngineFleet, engine_api_key
from slime.ray.waiting import ProcessDied
from slime.utils.types import EngineEndpoint


class Cluster:
    """Engines as one list of requests and a set of the dead; every rank serves at a fixed address."""

    def __init__(self, colocated: bool) -> None:
        self.colocated = colocated
        self.requests: list[tuple[str, str]] = []
        self.dead: set[str] = set()
        self.versions: dict[str, str] = {}
        self.routed: list[str] = []
        self.router_fails = False
        self.lost_keepers: set[Any] = set()

    def endpoint(self, rank: int) -> EngineEndpoint:
        return EngineEndpoint(f"http://engine{rank}", None, 1, rank if self.colocated else None)

    def ask(self, url: str, name: str) -> None:
        if url in self.dead:
            raise EngineError(url, name, None, "connection refused")
        self.requests.append((url, name))


class Call:
    def __init__(self, actor: "Keeper", method: str) -> None:
        self.actor, self.method = actor, method

    def remote(self, *arguments: Any) -> tuple["Keeper", str]:
        return self.actor, self.method


class Keeper:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __getattr__(self, method: str) -> Call:
        return Call(self, method)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    def build(colocated: bool = False, fault_tolerant: bool = True) -> tuple[EngineFleet, Cluster]:
        cluster = Cluster(colocated)

        class Client:
            def __init__(self, endpoint: EngineEndpoint) -> None:
                self.url = endpoint.url

            def weight_version(self) -> str:
                cluster.ask(self.url, "weight_version")
                return cluster.versions.get(self.url, "1")

            def release_memory_occupation(self) -> None:
                cluster.ask(self.url, "release")

            def resume_memory_occupation(self, tags: list[str]) -> None:
                cluster.ask(self.url, f"resume {','.join(tags)}")

        class Router:
            def register_worker(self, url: str) -> None:
                cluster.routed.append(url)

            def remove_worker(self, url: str) -> None:
                if cluster.router_fails:
                    raise RouterError("the router is gone")
                cluster.routed.remove(url)

            def is_alive(self) -> bool:
                return True

            def shutdown(self) -> None:
                cluster.requests.append(("router", "shutdown"))

        def wait_one(call: tuple[Keeper, str], what: str, timeout: float) -> str | None:
            if call[0] in cluster.lost_keepers:
                raise ProcessDied(f"{what}: the process of rank 0 ended")
            return None

        def wait_all(calls: list[tuple[Keeper, str]], what: str, timeout: float) -> list[EngineEndpoint]:
            return [cluster.endpoint(keeper.rank) for keeper, _ in calls]

        ray = engine_fleet.ray
        monkeypatch.setattr(ray, "nodes", list)
        monkeypatch.setattr(ray, "kill", lambda actor: None)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        monkeypatch.setattr(engine_fleet, "EngineClient", Client)
        monkeypatch.setattr(engine_fleet, "wait_one", wait_one)
        monkeypatch.setattr(engine_fleet, "wait_all", wait_all)
        monkeypatch.setattr(engine_fleet, "WATCH_INTERVAL", 0.01)
        monkeypatch.setattr(EngineFleet, "_spawn", _spawn)
        monkeypatch.setattr(EngineFleet, "_start_router", lambda self: Router())
        args = Namespace(
            rollout_num_gpus_per_engine=1,
            use_fault_tolerance=fault_tolerant,
            offload_rollout=colocated,
            engine_startup_timeout=5,
            rollout_health_check_interval=60.0,
            rollout_health_check_timeout=1.0,
            rollout_health_check_first_wait=0.0,
        )
        fleet = EngineFleet(args, range(2), trainer_gpus=2)  # type: ignore[arg-type]
        fleets.append(fleet)
        fleet.start()
        return fleet, cluster

    fleets: list[EngineFleet] = []
    yield build
    for fleet in fleets:
        fleet.stop()


def _spawn(self: EngineFleet, rank: int) -> engine_fleet.Engine:
    self.launches += 1
    return engine_fleet.Engine(rank, Keeper(rank))


def _wait_until(condition: Any) -> None:
    done = threading.Event()
    for _ in range(500):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("did not happen within 5 s")


def test_an_engine_whose_keeper_is_gone_leaves_the_router(make) -> None:
    fleet, cluster = make()
    cluster.lost_keepers.add(fleet.engines[0].actor)
    _wait_until(lambda: cluster.routed == ["http://engine1"])
    fleet.check()


def test_without_fault_tolerance_a_lost_keeper_ends_the_run(make) -> None:
    fleet, cluster = make(fault_tolerant=False)
    cluster.lost_keepers.add(fleet.engines[0].actor)
    _wait_until(lambda: fleet.failure is not None)
    with pytest.raises(EngineFailure, match=r"engine 0 .* ended: its keeper is gone"):
        fleet.check()


def test_stopping_goes_on_after_a_keeper_that_is_gone(make) -> None:
    fleet, cluster = make(fault_tolerant=False)
    cluster.lost_keepers.add(fleet.engines[0].actor)
    fleet.stop()
    assert ("router", "shutdown") in cluster.requests


def test_a_router_that_keeps_a_dead_engine_ends_the_run(make) -> None:
    fleet, cluster = make()
    cluster.router_fails = True
    cluster.lost_keepers.add(fleet.engines[0].actor)
    _wait_until(lambda: fleet.failure is not None)
    with pytest.raises(EngineFailure, match=r"engine 0 .* the router is gone"):
        fleet.check()


def test_an_error_of_the_watcher_itself_ends_the_run(make, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = make()
    monkeypatch.setattr(engine_fleet, "_death", lambda engine: 1 / 0)
    _wait_until(lambda: fleet.failure is not None)
    with pytest.raises(EngineFailure, match="ZeroDivisionError"):
        fleet.check()


def test_a_replacement_at_the_same_address_counts_as_a_launch(make) -> None:
    fleet, cluster = make()
    before, launches = fleet.endpoints, fleet.launches
    cluster.lost_keepers.add(fleet.engines[0].actor)
    _wait_until(lambda: len(fleet.engines) == 1)
    assert fleet.recover() == before
    assert fleet.launches == launches + 1


def test_recovery_finds_a_death_that_the_watcher_has_not_seen(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineFleet, "_watch", lambda self: None)
    fleet, cluster = make()
    lost = fleet.engines[0]
    cluster.lost_keepers.add(lost.actor)
    fleet.recover()
    assert lost not in fleet.engines
    assert [engine.rank for engine in fleet.engines] == [0, 1]


def test_a_replacement_serves_only_once_it_has_current_weights(make) -> None:
    fleet, cluster = make()
    cluster.lost_keepers.add(fleet.engines[0].actor)
    _wait_until(lambda: cluster.routed == ["http://engine1"])
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
    cluster.lost_keepers.add(fleet.engines[0].actor)
    _wait_until(lambda: len(fleet.engines) == 1)
    fleet.recover()
    assert cluster.requests == [("http://engine0", "release"), ("http://engine0", "resume weights")]


@pytest.mark.parametrize("method", ["release", "resume", "admit"])
def test_an_engine_found_dead_by_a_request_is_left_to_recovery(method: str, make) -> None:
    fleet, cluster = make(colocated=True)
    cluster.dead.add("http://engine0")
    arguments: dict[str, list[Any]] = {"release": [], "resume": [["weights"]], "admit": ["1"]}
    getattr(fleet, method)(*arguments[method])
    assert [engine.rank for engine in fleet.engines] == [1]
    assert cluster.routed == ["http://engine1"]


def test_without_fault_tolerance_a_dead_engine_fails_the_request(make) -> None:
    fleet, cluster = make(colocated=True, fault_tolerant=False)
    cluster.dead.add("http://engine0")
    with pytest.raises(EngineError, match="engine0"):
        fleet.release()


def test_a_token_is_made_for_engines_that_leave_loopback() -> None:
    args = Namespace(sglang_api_key=None)
    assert engine_api_key(args, "127.0.0.1") is None
    tokens = {engine_api_key(args, "10.0.0.1") for _ in range(2)}
    assert len(tokens) == 2 and min(len(token or "") for token in tokens) >= 32
    assert engine_api_key(Namespace(sglang_api_key="mine"), "10.0.0.1") == "mine"
