"""Every metric that a run can write is in the table of the docs, with a unit or a reason for none."""

import json
from pathlib import Path

import pytest

from slime.training.batch import FIELDS
from slime.training.passes import ACTOR_PASSES, CRITIC_PASSES
from tests.metric_table import table, undescribed

CURVES = Path(__file__).parents[1] / "golden/curves.json"


def test_what_the_curves_of_all_algorithms_hold_is_described() -> None:
    cases = json.loads(CURVES.read_text())
    rows = [row for case in cases.values() for part in ("rollouts", "steps") for row in case[part]]
    names = {name for row in rows for name in row}
    assert len(names) > 25 and undescribed(names) == set()


def test_averages_of_batch_fields_and_times_of_passes_are_described() -> None:
    fields = {f"rollout/{name}" for name, field in FIELDS.items() if field.average}
    times = {f"perf/{one.name}_time" for one in ACTOR_PASSES}
    times |= {f"perf/critic-{one.name}_time" for one in CRITIC_PASSES}
    assert len(fields) > 10 and undescribed(fields | times) == set()


@pytest.mark.parametrize("name", ["rollout/nothing", "train/losses", "perf/step_time/mean", "loss"])
def test_a_name_that_is_not_there_is_noticed(name) -> None:
    assert undescribed([name, "train/loss", "rollout/dropped/aborted", "perf/critic-values_time"]) == {name}


def test_no_name_is_described_twice() -> None:
    patterns = [pattern.pattern for pattern in table()]
    assert len(patterns) > 70 and len(set(patterns)) == len(patterns)
