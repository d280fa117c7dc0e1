"""What the page shows is what the file of metrics holds, as it grows."""

import json
import re

import orjson
import pytest

from slime.dashboard.metrics import MAX_POINTS, MetricsFile, thinned
from slime.observability.jsonl import JsonlWriter, read_metrics


@pytest.fixture
def written(tmp_path):
    return JsonlWriter(tmp_path / "metrics.jsonl")


def look(writer: JsonlWriter) -> MetricsFile:
    metrics = MetricsFile(writer.path)
    metrics.refresh()
    return metrics


def test_curves_are_those_of_the_file(written) -> None:
    for step in range(5):
        written.write(
            "rollout", step, {"rollout/raw_reward": step / 2, "rollout/name": "text", "rollout/on": True}
        )
        written.write("train", step, {"train/loss": float("nan") if step == 2 else -step})
    metrics = look(written)
    expected = {
        step: row["rollout/raw_reward"] for step, row in read_metrics(written.path)["rollout"].items()
    }
    assert dict(metrics.curve("rollout/raw_reward")) == expected
    assert metrics.curve("train/loss") == [(0, 0), (1, -1), (2, None), (3, -3), (4, -4)]
    summary = metrics.summary()
    assert summary["metrics"].keys() == {"rollout/raw_reward", "train/loss"}
    assert summary["ends"] == {"rollout": 4, "train": 4} and summary["wrote"] >= summary["began"]
    assert metrics.curve("rollout/no_such") == []


def test_what_is_written_later_is_seen_and_half_a_line_is_not(written) -> None:
    written.write("rollout", 0, {"a": 1})
    metrics = look(written)
    with written.path.open("ab") as file:
        file.write(b'{"axis": "rollout", "step": 1, "ti')
    metrics.refresh()
    assert metrics.curve("a") == [(0, 1)]
    with written.path.open("ab") as file:
        file.write(b'me": 1.0, "a": 2}\n')
    metrics.refresh()
    assert metrics.curve("a") == [(0, 1), (1, 2)]


def test_a_repeated_step_wins_and_a_shorter_file_is_another_run(written) -> None:
    for step, value in ((0, 1), (1, 2), (1, 5)):
        written.write("rollout", step, {"a": value})
    metrics = look(written)
    assert metrics.curve("a") == [(0, 1), (1, 5)]
    written.path.write_bytes(orjson.dumps({"axis": "rollout", "step": 7, "time": 1.0, "b": 3}) + b"\n")
    metrics.refresh()
    assert metrics.curve("a") == [] and metrics.curve("b") == [(7, 3)]


def test_a_file_that_begins_otherwise_is_another_run_however_long(written, tmp_path) -> None:
    """Replaced, or written anew where it was."""
    written.write("rollout", 0, {"a": 1})
    metrics = look(written)
    rows = [orjson.dumps({"axis": "rollout", "step": step, "time": 9.0, "b": 3}) + b"\n" for step in range(9)]
    (tmp_path / "other").write_bytes(b"".join(rows))
    (tmp_path / "other").replace(written.path)
    metrics.refresh()
    assert metrics.curve("a") == [] and metrics.curve("b") == [(step, 3) for step in range(9)]
    written.path.write_bytes(b"".join(rows).replace(b"9.0", b"8.0").replace(b'"b"', b'"cc"'))
    metrics.refresh()
    assert metrics.curve("b") == [] and len(metrics.curve("cc")) == 9


def test_a_long_file_is_read_by_looks_that_end(written) -> None:
    for step in range(20):
        written.write("rollout", step, {"a": step})
    metrics = MetricsFile(written.path)
    read = []
    while not read or read[-1] < 1:
        metrics.refresh(0)
        read.append(metrics.summary()["read"])
    assert len(read) > 1 and read == sorted(set(read))
    assert metrics.curve("a") == [(step, step) for step in range(20)]
    with written.path.open("ab") as file:
        file.write(b'{"axis": "rollout", ')
    metrics.refresh()
    assert metrics.summary()["read"] == 1  # no more can be read yet


def test_steps_that_are_written_out_of_order_have_the_highest_as_their_last(written) -> None:
    for step in (*range(30), 31, 30):
        written.write("rollout", step, {"perf/step_time": float(step)})
    metrics = look(written)
    assert metrics.summary()["metrics"]["perf/step_time"]["last"] == 31
    assert metrics.seconds() == {"step": sum(range(12, 32)) / 20}


@pytest.mark.parametrize(
    "line",
    [
        b"rubbish",
        b"[]",
        b"1",
        b'{"axis": "train"}',
        b'{"axis": "a", "step": {}, "time": 1}',
        b'{"axis": "a", "step": 1, "time": "nan"}',
    ],
)
def test_a_line_that_is_no_row_is_named_and_keeps_what_was_read(written, line: bytes) -> None:
    written.write("rollout", 0, {"a": 1})
    with written.path.open("ab") as file:
        file.write(line + b"\n")
    metrics = MetricsFile(written.path)
    with pytest.raises(ValueError, match=r"metrics.jsonl, byte \d+: not a row of metrics"):
        metrics.refresh()
    assert metrics.curve("a") == [(0, 1)]


def test_long_curves_are_thinned_to_means_with_their_ends(written) -> None:
    points = [(step, float(step % 2)) for step in range(100_000)]
    found = list(thinned(points, MAX_POINTS))
    assert len(found) == MAX_POINTS and found[0][0] == 0 and found[-1] == points[-1]
    assert all(0.4 < value < 0.6 for _, value in found[:-1])
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    assert thinned(points[:MAX_POINTS], MAX_POINTS) == points[:MAX_POINTS]
    assert list(thinned([(0, None), (1, None), (2, 4.0), (3, 1.0)], 2)) == [(0, 4.0), (3, 1.0)]


def test_seconds_of_a_step_are_means_of_the_last(written) -> None:
    for step in range(30):
        written.write(
            "rollout", step, {"perf/step_time": float(step), "perf/rollout_time": 1.0, "perf/tflops": 9}
        )
    assert look(written).seconds() == {"step": sum(range(10, 30)) / 20, "rollout": 1.0}


@pytest.mark.parametrize("name", ["rollout/raw_reward", "train/grad_norm", "perf/rollout_time"])
def test_numbers_at_the_end_of_what_a_float_holds_are_shown(written, name) -> None:
    for step in range(MAX_POINTS + 10):
        written.write("rollout", step, {name: 1.7e308})
    metrics = look(written)
    assert metrics.curve(name)[-1] == (MAX_POINTS + 9, 1.7e308)
    told = [metrics.curve(name), metrics.seconds(), metrics.summary(), metrics.table([re.compile(name)], 5)]
    json.dumps([*told, [alert.found for alert in metrics.alerts()]], allow_nan=False)
