"""Every metric that a run can write is in the table, and the page of the docs is made of it."""

import json
from pathlib import Path

import pytest

from slime.observability.metric_table import METRICS, every_metric, undescribed
from slime.training.batch import FIELDS, Average
from slime.training.passes import ACTOR_PASSES, CRITIC_PASSES
from tests.page_runs import printed
from tools import generate_metric_docs
from tools.generate_metric_docs import PAGE, metric_page

CURVES = Path(__file__).parents[1] / "golden/curves.json"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == metric_page(), "run python tools/generate_metric_docs.py"
    assert list(METRICS) == ["Rollouts", "Optimizer steps", "Time and throughput", "Evaluations"]


def test_what_the_curves_of_all_algorithms_hold_is_described() -> None:
    cases = json.loads(CURVES.read_text())
    rows = [row for case in cases.values() for part in ("rollouts", "steps") for row in case[part]]
    names = {name for row in rows for name in row}
    assert len(names) > 25 and undescribed(names) == set()


def test_averages_of_batch_fields_are_described_as_the_trainer_takes_them() -> None:
    words = {Average.BY_ROLLOUT: "trained tokens, by rollout", Average.BY_SAMPLE: "samples"}
    averaged = {name: field.average for name, field in FIELDS.items() if field.average}
    found = {
        name: metric.average
        for name in averaged
        for metric in every_metric()
        if metric.pattern.fullmatch(f"rollout/{name}")
    }
    assert len(found) > 10 and found == {name: words[average] for name, average in averaged.items()}


def test_times_of_passes_are_described() -> None:
    times = {f"perf/{one.name}_time" for one in ACTOR_PASSES}
    times |= {f"perf/critic-{one.name}_time" for one in CRITIC_PASSES}
    assert undescribed(times) == set()


@pytest.mark.parametrize("name", ["rollout/nothing", "train/losses", "perf/step_time/mean", "loss"])
def test_a_name_that_is_not_there_is_noticed(name) -> None:
    assert undescribed([name, "train/loss", "rollout/dropped/aborted", "perf/critic-values_time"]) == {name}


def test_no_name_is_described_twice() -> None:
    patterns = [metric.pattern.pattern for metric in every_metric()]
    assert len(patterns) > 70 and len(set(patterns)) == len(patterns)


def test_the_page_is_written_as_printed(tmp_path, monkeypatch) -> None:
    (command,) = printed("python tools/generate_metric_docs.py")
    monkeypatch.setattr("sys.argv", list(command.words[1:]))
    monkeypatch.setattr(generate_metric_docs, "PAGE", tmp_path / PAGE.name)
    assert generate_metric_docs.main() == 0
    assert (tmp_path / PAGE.name).read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
