"""Who finds dead engines, when, and that nobody else is held up meanwhile."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slime.processes import silence
from slime.ray import engine, engine_watch
from slime.ray.engine import EngineState
from slime.ray.engine_watch import EngineFailure, EngineWatch, WatchTimes
from slime.ray.served_model import ServedModel
from tests.ray.stand_ins import Cluster, client_class, wait_until

A, B = "http://engine0", "http://engine1"


class Watched:
    """A model of two engines that serve, and its watch."""

    def __init__(
        self, cluster: Cluster, tolerant: bool = True, router_restarts: int = 0, **times: float
    ) -> None:
        self.cluster = cluster
        self.model: ServedModel = cluster.model(2, router_restarts=router_restarts)
        self.model.launch()
        self.model.wait_ready(5)
        for one in self.model.living:
            self.model.admit(one)
        self.watch = EngineWatch(
            [self.model], WatchTimes(**{"interval": 0.02, "timeout": 1.5, **times}), tolerant=tolerant
        )

    @property
    def states(self) -> list[EngineState]:
        return [one.state for one in self.model.engines]

    @property
    def checks(self) -> int:
        return len(self.cluster.checked)

    def pause(self) -> None:
        """Returns when no check is under way any more, either."""
        self.watch.pause()
        wait_until(lambda: not self.watch._checking)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    def build(tolerant: bool = True, **times: Any) -> Watched:
        cluster = Cluster()
        monkeypatch.setattr(engine, "EngineClient", client_class(cluster))
        monkeypatch.setattr(engine_watch, "LOOK_INTERVAL", 0.02)
        built.append(Watched(cluster, tolerant, **times))
        return built[-1]

    built: list[Watched] = []
    yield build
    for fleet in built:
        for hanging in fleet.cluster.hanging.values():
            hanging.set()
        fleet.watch.stop()
        fleet.watch._pool.shutdown()  # a check that begins late would be one of the next test's cluster


@pytest.fixture
def fleet(make) -> Watched:
    return make()


def failed(fleet: Watched) -> bool:
    try:
        fleet.watch.check()
    except EngineFailure:
        return True
    return False


DEAD, SERVING = EngineState.DEAD, EngineState.SERVING


def test_it_starts_paused_and_checks_once_resumed(fleet) -> None:
    fleet.watch.start()
    time.sleep(0.1)
    assert fleet.cluster.checked == []
    fleet.watch.resume()
    wait_until(lambda: fleet.checks >= 6)
    assert set(fleet.cluster.checked) == {A, B} and fleet.states == [SERVING, SERVING]


def test_a_sick_engine_is_dealt_with_and_the_others_are_watched_on(fleet, caplog) -> None:
    fleet.cluster.sick[A] = False
    fleet.watch.start()
    fleet.watch.resume()
    wait_until(lambda: fleet.cluster.stopped == [0])
    before = fleet.cluster.checked.count(B)
    wait_until(lambda: fleet.cluster.checked.count(B) >= before + 3)
    assert fleet.cluster.checked.count(A) == 1
    assert fleet.states == [DEAD, SERVING]
    assert (fleet.cluster.routed, fleet.cluster.stopped) == ([B], [0])
    assert f"engine 0 ({A}) ended: no healthy answer within 1.5 s" in caplog.text
    fleet.watch.check()


def test_an_exception_is_a_failed_check(fleet, caplog) -> None:
    fleet.cluster.sick[B] = ConnectionError("refused")
    fleet.watch.start()
    fleet.watch.resume()
    wait_until(lambda: fleet.states == [SERVING, DEAD])
    wait_until(lambda: "ConnectionError: refused" in caplog.text)


def test_engines_that_join_are_watched(fleet) -> None:
    fleet.cluster.ended[0] = "killed by SIGKILL"
    fleet.watch.start()
    fleet.watch.resume()
    wait_until(lambda: fleet.model.dead and fleet.model.dead[0].gone.is_set())
    (new,) = fleet.model.replace_gone()
    fleet.cluster.sick[A] = False
    time.sleep(0.1)
    assert new.state is EngineState.STARTING  # neither looked at nor checked
    fleet.model.wait_ready(5)
    wait_until(lambda: new.state is DEAD)


def test_nothing_is_checked_while_paused(fleet) -> None:
    fleet.watch.start()
    fleet.watch.resume()
    wait_until(lambda: fleet.checks)
    fleet.pause()
    seen = fleet.checks
    time.sleep(0.1)
    assert fleet.checks == seen
    fleet.watch.resume()
    wait_until(lambda: fleet.checks > seen)


@pytest.mark.parametrize("resumed", [False, True], ids=["paused", "paused and resumed"])
def test_a_check_under_way_when_paused_finds_nothing(fleet, resumed: bool) -> None:
    entered, release, found = threading.Event(), threading.Event(), []

    def slow_the_first_time() -> bool:
        if entered.is_set():
            return True
        entered.set()
        release.wait(120)
        found.append(False)
        return False

    fleet.cluster.sick[A] = slow_the_first_time
    fleet.watch.start()
    fleet.watch.resume()
    assert entered.wait(60)
    fleet.watch.pause()
    if resumed:
        fleet.watch.resume()
        wait_until(lambda: fleet.cluster.checked.count(A) > 1)
    release.set()
    wait_until(lambda: found)
    time.sleep(0.1)
    assert fleet.states == [SERVING, SERVING]


def test_a_pause_lets_nothing_through(make) -> None:
    """Whatever the moment of the pause, no engine that lives then is found dead afterwards."""
    for delay in (0.0, 0.001, 0.003, 0.01):
        fleet = make(interval=0.001)
        fleet.cluster.sick.update({A: False})
        fleet.watch.start()
        fleet.watch.resume()
        time.sleep(delay)
        fleet.watch.pause()
        states = fleet.states
        time.sleep(0.03)
        assert fleet.states == states


def test_the_first_check_after_each_resume_waits(make) -> None:
    fleet = make(interval=0.01, first_wait=0.3)
    fleet.watch.start()
    for _ in range(2):
        fleet.cluster.checked.clear()
        resumed = time.monotonic()
        fleet.watch.resume()
        wait_until(lambda: fleet.checks)
        assert time.monotonic() - resumed >= 0.3
        fleet.pause()


def test_stop_ends_the_thread_and_finds_nothing_more(fleet) -> None:
    fleet.watch.start()
    fleet.watch.resume()
    wait_until(lambda: fleet.checks)
    fleet.watch.stop()
    assert not fleet.watch._thread.is_alive()
    fleet.watch.declare_dead(fleet.model, fleet.model.engines[0], "it was stopped")
    assert fleet.states == [SERVING, SERVING]


@pytest.mark.parametrize("hanging", [A, 0], ids=["health check", "look"])
def test_a_hanging_engine_does_not_delay_another_ones_death(fleet, hanging: Any) -> None:
    fleet.cluster.hanging[hanging] = threading.Event()
    fleet.watch.start()
    fleet.watch.resume()
    wait_until(lambda: fleet.cluster.hung == [hanging])
    fleet.cluster.ended[1] = "killed by SIGKILL"
    wait_until(lambda: fleet.states == [SERVING, DEAD])
    assert fleet.cluster.hung == [hanging], "it hangs yet"


def test_a_hanging_check_does_not_delay_the_health_checks_of_others(fleet) -> None:
    fleet.cluster.hanging[A] = threading.Event()
    fleet.watch.start()
    fleet.watch.resume()
    wait_until(lambda: A in fleet.cluster.checked)
    fleet.cluster.sick[B] = False
    wait_until(lambda: fleet.states == [SERVING, DEAD])
    assert fleet.cluster.checked.count(A) == 1  # one that is under way is not repeated


def test_a_router_that_hangs_over_one_engine_does_not_delay_another_ones_death(fleet, monkeypatch) -> None:
    blocked, release = threading.Event(), threading.Event()

    def dismiss(one: Any) -> None:
        if one.rank == 0:
            blocked.set()
            release.wait(120)

    monkeypatch.setattr(fleet.model, "dismiss", dismiss)
    fleet.watch.start()
    fleet.watch.resume()
    fleet.cluster.ended[0] = "killed by SIGKILL"
    assert blocked.wait(60)
    fleet.watch.pause()
    fleet.watch.check()
    fleet.cluster.ended[1] = "killed by SIGKILL"
    wait_until(lambda: fleet.states == [DEAD, DEAD])
    assert not fleet.model.engines[0].gone.is_set()
    release.set()


def test_a_death_is_dealt_with_once(fleet) -> None:
    victim = fleet.model.engines[0]
    threads = [
        threading.Thread(target=fleet.watch.declare_dead, args=(fleet.model, victim, "no answer"))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert fleet.cluster.stopped == [0] and fleet.cluster.routed == [B]


def test_the_end_of_a_router_ends_the_run(fleet) -> None:
    fleet.watch.start()
    fleet.cluster.router_ended = "router (http://router): killed by SIGKILL"

    wait_until(lambda: failed(fleet))
    with pytest.raises(EngineFailure, match=r"the router ended: router .* killed by SIGKILL"):
        fleet.watch.check()


def test_a_router_that_may_be_started_again_is_and_the_run_goes_on(make, caplog) -> None:
    fleet = make(router_restarts=1)
    fleet.watch.start()
    fleet.cluster.router_ended = "router (http://router): killed by SIGKILL"
    wait_until(lambda: sorted(fleet.cluster.routed) == [A, B] and fleet.cluster.router_ended is None)
    fleet.watch.check()
    assert "started again: router (http://router): killed by SIGKILL" in caplog.text
    fleet.cluster.router_ended = "router (http://router): killed by SIGABRT"
    wait_until(lambda: failed(fleet))
    with pytest.raises(EngineFailure, match=r"the router ended: 1 restarts? .*killed by SIGABRT"):
        fleet.watch.check()


def test_a_router_that_starts_slowly_does_not_delay_an_engines_death(make, monkeypatch) -> None:
    fleet = make(router_restarts=1)
    starting, release = threading.Event(), threading.Event()
    start = fleet.model._start_router
    monkeypatch.setattr(
        fleet.model, "_start_router", lambda: [starting.set(), release.wait(120), start()][-1]
    )
    fleet.watch.start()
    fleet.cluster.router_ended = "killed by SIGKILL"
    assert starting.wait(60)
    fleet.cluster.ended[0] = "killed by SIGKILL"
    wait_until(lambda: fleet.states == [DEAD, SERVING])
    release.set()
    wait_until(lambda: fleet.cluster.routed == [B] and fleet.model.engines[0].gone.is_set())


def test_an_engine_that_hangs_is_found_when_it_is_asked_for_though_checks_are_paused(fleet, caplog) -> None:
    fleet.cluster.sick[A] = False
    fleet.watch.probe()
    assert fleet.states == [DEAD, SERVING] and set(fleet.cluster.checked) == {A, B}
    assert f"engine 0 ({A}) ended: no answer within 1.5 s, in or after a weight update" in caplog.text


def test_the_first_failure_is_the_one_that_is_told(fleet) -> None:
    fleet.watch.fail("first")
    fleet.watch.fail("second")
    with pytest.raises(EngineFailure, match="first"):
        fleet.watch.check()


def test_without_any_engine_left_that_generates_the_run_ends(fleet) -> None:
    fleet.watch.resume()
    for one in fleet.model.engines:
        fleet.watch.declare_dead(fleet.model, one, "killed by SIGKILL")
    with pytest.raises(EngineFailure, match=r"engine 1 .* killed by SIGKILL; no engine is left"):
        fleet.watch.check()


def test_all_engines_may_die_where_others_can_take_their_places_before_the_next_rollout(fleet) -> None:
    for one in fleet.model.engines:
        fleet.watch.declare_dead(fleet.model, one, "killed by SIGKILL")
    fleet.watch.check()
    assert fleet.cluster.stopped == [0, 1] and fleet.model.is_lost


def test_without_tolerance_an_engine_that_hangs_ends_the_run_at_a_named_deadline(make) -> None:
    fleet = make(tolerant=False, hang=0.3)
    fleet.cluster.sick[A] = False
    fleet.watch.start()
    resumed = time.monotonic()
    fleet.watch.resume()
    wait_until(lambda: failed(fleet))
    assert time.monotonic() - resumed >= 0.3
    with pytest.raises(
        EngineFailure, match=r"engine 0 .*hangs, \d+ s without .* \(--rollout-engine-hang-timeout\)"
    ):
        fleet.watch.check()
    assert fleet.cluster.stopped == []  # the end of the run will end it


@pytest.fixture
def check_at(make, monkeypatch: pytest.MonkeyPatch):
    """``check_at(seconds, healthy)``: one health check of each engine at that time; and the fleet."""
    fleet = make(tolerant=False, hang=0.3)
    clock = SimpleNamespace(now=1000.0)
    for module in (engine_watch, silence):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def check(seconds: float, healthy: bool) -> None:
        clock.now, fleet.cluster.sick[A] = 1000.0 + seconds, healthy
        fleet.watch._begin_checks()
        wait_until(lambda: not fleet.watch._checking)

    fleet.watch.resume()
    return check, fleet


def test_without_tolerance_one_healthy_answer_is_enough_to_go_on(check_at) -> None:
    check, fleet = check_at
    for seconds, healthy in ((0.0, False), (0.29, False), (0.3, True), (0.59, False), (0.61, True)):
        check(seconds, healthy)
        assert not failed(fleet) and fleet.states == [SERVING, SERVING]
    check(0.92, False)
    assert failed(fleet)


def test_nothing_is_held_against_an_engine_for_the_time_in_which_nobody_asked_it(check_at) -> None:
    """As where the manager was stopped, between two checks at a bad moment of the engine's."""
    check, fleet = check_at
    for seconds, healthy in ((0.0, True), (0.2, False), (600.0, False), (600.29, False)):
        check(seconds, healthy)
        assert not failed(fleet)
    check(600.31, False)
    assert failed(fleet)


def test_silence_before_a_pause_does_not_count_after_it(check_at) -> None:
    check, fleet = check_at
    for seconds in (0.0, 0.2, 0.4):
        check(seconds, False)
        check(seconds + 0.2, False)
        fleet.watch.pause()
        fleet.watch.resume()
    assert not failed(fleet)
