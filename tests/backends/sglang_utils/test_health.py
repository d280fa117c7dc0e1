import threading
import time

import pytest

from slime.backends.sglang_utils.health import HealthMonitor


class Fleet:
    """Engines whose health a test sets; records what the monitor did."""

    def __init__(self):
        self.healthy = {"a": True, "b": True}
        self.checked = []
        self.failures = []
        self.changed = threading.Condition()

    def checks(self):
        return {name: lambda timeout, name=name: self.check(name) for name in list(self.healthy)}

    def check(self, name):
        with self.changed:
            self.checked.append(name)
            self.changed.notify_all()
        if isinstance(self.healthy[name], Exception):
            raise self.healthy[name]
        return self.healthy[name]

    def on_failure(self, name, reason):
        with self.changed:
            self.failures.append((name, reason))
            self.healthy.pop(name)
            self.changed.notify_all()

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, 20), "condition did not come true"


@pytest.fixture
def fleet():
    return Fleet()


@pytest.fixture
def monitor(fleet):
    monitor = HealthMonitor(fleet.checks, fleet.on_failure, interval=0.02, timeout=1.5)
    yield monitor
    monitor.stop()


def test_it_starts_paused_and_checks_once_resumed(fleet, monitor):
    assert monitor.start()
    assert not monitor.start()
    time.sleep(0.1)
    assert fleet.checked == [] and not monitor.is_checking_enabled
    monitor.resume()
    assert monitor.is_checking_enabled
    fleet.wait_for(lambda: len(fleet.checked) >= 6)
    assert set(fleet.checked) == {"a", "b"} and fleet.failures == []


def test_a_sick_engine_is_reported_and_the_others_are_watched_on(fleet, monitor):
    fleet.healthy["a"] = False
    monitor.start()
    monitor.resume()
    fleet.wait_for(lambda: fleet.checked.count("b") >= 3)
    assert fleet.failures == [("a", "no healthy answer within 1.5 s")]
    assert fleet.checked.count("a") == 1


def test_an_exception_is_a_failed_check(fleet, monitor):
    fleet.healthy["b"] = ConnectionError("refused")
    monitor.start()
    monitor.resume()
    fleet.wait_for(lambda: fleet.failures)
    assert fleet.failures == [("b", "ConnectionError: refused")]


def test_engines_that_join_are_watched(fleet, monitor):
    monitor.start()
    monitor.resume()
    fleet.wait_for(lambda: fleet.checked)
    fleet.healthy["c"] = False
    fleet.wait_for(lambda: fleet.failures)
    assert fleet.failures[0][0] == "c"


def test_nothing_is_checked_while_paused(fleet, monitor):
    monitor.start()
    monitor.resume()
    fleet.wait_for(lambda: fleet.checked)
    monitor.pause()
    time.sleep(0.1)
    seen = len(fleet.checked)
    time.sleep(0.1)
    assert len(fleet.checked) == seen
    monitor.resume()
    fleet.wait_for(lambda: len(fleet.checked) > seen)


def test_a_check_under_way_when_paused_reports_nothing(fleet):
    entered, release = threading.Event(), threading.Event()

    def slow_check(timeout):
        entered.set()
        release.wait(20)
        return False

    monitor = HealthMonitor(lambda: {"a": slow_check}, fleet.on_failure, interval=0.01, timeout=5)
    monitor.start()
    monitor.resume()
    assert entered.wait(20)
    monitor.pause()
    release.set()
    time.sleep(0.1)
    monitor.stop()
    assert fleet.failures == []


def test_the_first_round_after_each_resume_waits(fleet):
    monitor = HealthMonitor(fleet.checks, fleet.on_failure, interval=0.01, timeout=1, first_wait=0.3)
    monitor.start()
    for _ in range(2):
        fleet.checked.clear()
        resumed = time.monotonic()
        monitor.resume()
        fleet.wait_for(lambda: fleet.checked)
        assert time.monotonic() - resumed >= 0.3
        monitor.pause()
        time.sleep(0.05)
    monitor.stop()


def test_stop_ends_the_thread(fleet, monitor):
    monitor.start()
    monitor.resume()
    fleet.wait_for(lambda: fleet.checked)
    monitor.stop()
    assert not any(thread.name == "engine-health" for thread in threading.enumerate())
    assert not monitor.is_checking_enabled
