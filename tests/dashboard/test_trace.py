"""What a step's processes did is what the trace says of its time."""

import json
from pathlib import Path

import pytest

from slime.dashboard.trace import TraceFile, covered, own_seconds
from slime.observability import spans
from slime.observability.spans import Span
from tests.dashboard.planted import RANKS, ROLLOUTS, SLOW, plant


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> TraceFile:
    return read(plant(tmp_path_factory.mktemp("planted")) / "trace.json")


def read(path: Path) -> TraceFile:
    trace = TraceFile(path)
    trace.refresh(60)
    return trace


def test_a_step_says_what_each_process_did(planted) -> None:
    assert planted.steps() == {"count": ROLLOUTS, "steps": list(range(ROLLOUTS)), "read": 1.0}
    step = planted.step(SLOW + 1)
    seconds = {process["name"]: process["seconds"] for process in step["processes"]}
    assert step["seconds"] == pytest.approx(10) and len(seconds) == RANKS + 2
    assert seconds["actor rank 2"] == pytest.approx(
        {"log_probs": 2.5, "optimizer_step": 1.5, "actor_train": 0, "train": 0}, abs=1e-5
    )
    assert seconds["actor rank 1"]["train"] == pytest.approx(1.7) and seconds["driver"] == pytest.approx(
        {"update_weights": 1}
    )
    idle = {process["name"]: process["idle"] for process in step["processes"]}
    assert idle["rollouts"] == pytest.approx(6) and idle["driver"] == pytest.approx(9)
    lanes = {(process, lane) for process, lane, *_ in step["spans"]}
    assert ("rollouts", 2) in lanes and step["left_out"] == 0
    (tool,) = [span for span in step["spans"] if span[1:3] == (2, "tool")]
    assert tool[3:5] == pytest.approx((2, 1)) and tool[5] == {"group": 0, "sample": 1}
    assert planted.step(ROLLOUTS) is None


def test_a_rank_that_is_slower_than_the_others_is_told(planted) -> None:
    (alert,) = planted.alerts()
    assert (alert.rule, alert.step, alert.last, alert.is_over) == ("slow rank", SLOW, ROLLOUTS - 1, False)
    assert alert.found == "rank 2 of the actor takes 2.5 s for log_probs, the others 0.8 s"


def slowness(tmp_path: Path, seconds: list[tuple[float, ...]]) -> list[str]:
    writer = spans.TraceFile(tmp_path / "trace.json")
    for step, of_ranks in enumerate(seconds):
        for rank, own in enumerate(of_ranks):
            writer.write(f"actor rank {rank}", [Span("log_probs", 10.0 * step, 10.0 * step + own)])
        writer.write("driver", [Span("step", 10.0 * step, 10.0 * step + 9, attrs={"rollout": step})])
    writer.close()
    return [alert.when for alert in read(tmp_path / "trace.json").alerts()]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ([(1.0, 1.1)] * 5, []),
        ([(1.0,)] * 5, []),
        ([(1.0, 3.0), (3.0, 1.0)] * 5, []),  # work is shared out unevenly, but to nobody always
        ([(0.001, 0.01)] * 5, []),  # milliseconds
        ([(1.0, 1.0), *[(1.0, 2.0)] * 4], ["since rollout 1"]),
        ([*[(2.0, 1.0)] * 4, (1.0, 1.0)], ["rollout 0 to 3"]),
    ],
)
def test_only_one_that_is_always_slower_by_far_is_told(tmp_path, seconds, told) -> None:
    assert slowness(tmp_path, seconds) == told


def test_a_long_trace_is_read_by_looks_that_end_as_it_grows(tmp_path) -> None:
    slowness(tmp_path, [(1.0, 1.0)] * 10)
    trace, parts = TraceFile(tmp_path / "trace.json"), []
    while not parts or parts[-1] < 1:
        trace.refresh(0)
        parts.append(trace.steps()["read"])
    assert len(parts) > 10 and parts == sorted(parts) and trace.steps()["count"] == 10
    with (tmp_path / "trace.json").open("a") as file:
        file.write('{"pid": 1, "ph')
    trace.refresh(60)
    assert trace.steps() == {"count": 10, "steps": list(range(10)), "read": 1.0}
    slowness(tmp_path, [])
    (tmp_path / "trace.json").write_text("[\n")
    trace.refresh(60)
    assert trace.steps()["count"] == 0


def test_strange_events_are_passed_over_and_what_is_no_event_is_named(tmp_path) -> None:
    path = tmp_path / "trace.json"
    events = [
        {},
        [],
        3,
        {"ph": "X"},
        {"ph": "X", "pid": 1, "args": {}, "ts": "x"},
        {"ph": "M", "name": "process_name"},
    ]
    path.write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in events))
    assert read(path).steps()["count"] == 0
    path.write_text("[\nrubbish\n")
    with pytest.raises(ValueError, match=r"trace.json, byte 2: no event of a trace"):
        read(path)
    assert TraceFile().steps()["count"] == TraceFile(tmp_path / "none").steps()["count"] == 0


@pytest.mark.parametrize("field", ["ts", "dur"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_span_without_a_time_is_no_span(tmp_path, field, value) -> None:
    name = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "driver"}}
    step = {"ph": "X", "name": "step", "pid": 1, "tid": 0, "ts": 0, "dur": 1e6, "args": {"rollout": 0}}
    wrong = {**step, field: value, "args": {"rollout": 1}}
    (tmp_path / "trace.json").write_text("".join(f"{json.dumps(event)},\n" for event in (name, step, wrong)))
    trace = read(tmp_path / "trace.json")
    assert trace.steps()["steps"] == [0] and len(trace.step(0)["spans"]) == 1


def test_seconds_are_those_without_spans_within() -> None:
    lane = [
        ("p", 0, name, start, end - start, {})
        for name, start, end in (("a", 0, 10), ("b", 1, 4), ("c", 2, 3), ("b", 5, 6), ("a", 12, 13))
    ]
    assert own_seconds(lane) == {"a": 7.0, "b": 3.0, "c": 1.0}
    assert covered(lane) == 11.0
