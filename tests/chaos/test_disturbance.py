"""Whom a fault strikes."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from slime.chaos import disturbance
from slime.chaos.disturbance import Disturbance, Plan
from slime.chaos.faults import DEFAULT_KINDS, LASTS_S, Kind

RUN: Any = SimpleNamespace(status=None, started=time.monotonic(), pid=3, restarts=lambda: 0, steps=lambda: 0)
OLD = tuple(kind for kind in Kind if kind in ("kill", "stop", "pause", "term"))


def _struck(plan: Plan, roles: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> Disturbance:
    monkeypatch.setattr(disturbance, "strike", lambda *_: True)
    processes: Any = SimpleNamespace(roles=lambda: roles, look=lambda: None)
    return Disturbance(RUN, processes, plan, lambda line: None)


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (DEFAULT_KINDS, "stop 11, stop 8, pause 9, pause 8, pause 7, pause 10, stop 10, stop 7"),
        (OLD, "pause 11, term 8, term 10, term 12, kill 8, term 12, term 11, term 9"),
    ],
)
def test_a_seed_draws_the_faults_that_it_has_always_drawn(
    kinds: tuple[Kind, ...], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that are there were drawn so."""
    roles = {"driver": [7], "engine": [8, 9], "router": [10], "trainer rank": [11, 12]}
    struck = _struck(Plan(seed=3, kinds=kinds), roles, monkeypatch)
    monkeypatch.setattr(struck, "_wait", lambda is_over: True)
    for _ in range(8):
        assert struck._wait_for_the_moment() and struck._strike_somebody()
    assert ", ".join(f"{outcome.kind} {outcome.pid}" for outcome in struck.outcomes) == wanted


def test_shared_memory_is_the_machine_s_whoever_else_is_to_be_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    struck = _struck(Plan(kinds=(Kind.SHM,), roles=("engine",)), {"engine": [8]}, monkeypatch)
    assert struck._strike_somebody()
    assert [(found.role, found.pid) for found in struck.outcomes] == [("machine", RUN.pid)]


def test_nothing_else_befalls_a_victim_while_a_fault_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is stopped for good would be let go on, and a limit that is lowered twice would stay."""
    monkeypatch.setitem(LASTS_S, Kind.SLOW, 600.0)
    struck = _struck(Plan(kinds=(Kind.SLOW,)), {"engine": [8]}, monkeypatch)
    assert struck._allowed(Kind.SLOW) == struck._allowed(Kind.STOP) == {"engine": [8]}
    assert struck._strike_somebody()
    struck._processes.roles = lambda: {"engine": [8, 9], "router": [10]}
    assert struck._allowed(Kind.STOP) == {"engine": [9], "router": [10]}
    assert struck._allowed(Kind.MEMORY) == struck._allowed(Kind.SHM) == {}
    now = time.monotonic
    later = SimpleNamespace(monotonic=lambda: now() + 600 + disturbance.UNDONE_WITHIN_S)
    monkeypatch.setattr(disturbance, "time", later)
    assert struck._allowed(Kind.MEMORY) == {"engine": [8, 9], "router": [10]}


@pytest.mark.parametrize(("kind", "roles"), [(Kind.TERM, {"engine"}), (Kind.KILL, {"driver", "engine"})])
def test_nobody_tells_the_driver_to_end_which_is_the_end_of_the_run(
    kind: Kind, roles: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = _struck(Plan(kinds=(kind,)), {"driver": [7], "engine": [8]}, monkeypatch)
    for _ in range(40):
        assert struck._strike_somebody()
    assert {outcome.role for outcome in struck.outcomes} == roles
