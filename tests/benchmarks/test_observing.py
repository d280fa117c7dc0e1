"""What the benchmark of watching makes of what it has measured."""

import os
import subprocess
import sys

import pytest

from benchmarks import grpo_step
from benchmarks.grpo_step import CpuClock
from benchmarks.observing import figures, ledger_seconds


def run(wall, trainer, others):
    return {"wall_s": wall, "cpu_s": {"trainer": trainer, "engine": 2.0, "others": others}}


def test_watching_is_what_a_step_takes_beyond_one_without():
    without = [run([10.0, 12.0], 7.0, 1.0), run([11.0, 11.0], 7.0, 1.0)]
    found = figures(without, [run([11.0, 11.22], 7.3, 1.05), run([11.0, 20.0], 7.1, 1.15)], ledger=0.02)
    assert found["wall_s"] == {"without": 11.0, "with": pytest.approx(11.11)}
    assert found["share"] == pytest.approx({"wall": 0.01, "cpu": 0.032, "cpu_others": 0.012})


def test_the_books_of_a_step_are_balanced():
    assert ledger_seconds(repeats=2) > 0


def test_a_reading_after_an_engine_has_ended_is_late(monkeypatch):
    """What it took since the reading before is not known any more."""
    monkeypatch.setattr(
        grpo_step, "kind_of", lambda process: "engine" if process.pid == engine.pid else "others"
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as engine:
        clock = CpuClock(os.getpid())
        assert clock.read().keys() >= {"engine"} and not clock.is_late
        assert clock.read() and not clock.is_late
    assert clock.read()["engine"] >= 0 and clock.is_late
