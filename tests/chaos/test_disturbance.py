"""Whom a fault strikes."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from slime.chaos import disturbance
from slime.chaos.disturbance import Disturbance, Plan
from slime.chaos.faults import Kind


@pytest.mark.parametrize(("kind", "roles"), [(Kind.TERM, {"engine"}), (Kind.KILL, {"driver", "engine"})])
def test_nobody_tells_the_driver_to_end_which_is_the_end_of_the_run(
    kind: Kind, roles: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disturbance, "strike", lambda *_: True)
    run: Any = SimpleNamespace(status=None, started=time.monotonic(), restarts=lambda: 0, steps=lambda: 0)
    processes: Any = SimpleNamespace(roles=lambda: {"driver": [7], "engine": [8]})
    struck = Disturbance(run, processes, Plan(kinds=(kind,)), lambda line: None)
    for _ in range(40):
        assert struck._strike_somebody()
    assert {outcome.role for outcome in struck.outcomes} == roles
