"""Agents of another process are trained while their engines are killed, and no turn of theirs is lost."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.agents_proof import Evidence, prove
from tests.e2e.outside_agents import DIRECTORY, decided_model, flags

pytestmark = pytest.mark.e2e

STEPS = 16


def test_agents_that_know_an_address_lose_no_turn_to_updates_and_killed_engines(
    start: Any, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long form is ``benchmarks/killed_engines.py``, where the reward rises too."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    decided = decided_model(model, tmp_path / "decided")
    run = start(flags(decided, data / "rl.jsonl", STEPS, tmp_path), script="train_async.py").expect_success()
    assert run.books()[STEPS - 1]["trained"] > 0
    evidence = Evidence.of(tmp_path, STEPS)
    found = prove(evidence)
    assert found["turns"] > 300 and found["updates"] > STEPS
    assert found["kills"] > 3 and found["kills_in_turns"] > 1 and found["kills_in_updates"] > 1, found
    assert found["turns_of_several_versions"], found
    # Which of the two it is depends on what a dying engine has sent already.
    assert found["streams_continued_elsewhere"] or found["requests_asked_anew"], found
    run.expect_no_processes()
