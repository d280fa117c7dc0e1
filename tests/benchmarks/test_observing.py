"""What the benchmark of watching makes of what it has measured."""

import pytest

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
