"""What `benchmarks/chaos.py` wants of a run beside what ``slime chaos`` does, and how its results add up."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import come_and_go
from benchmarks.chaos import (
    LAYOUTS,
    RESULTS,
    ROOT,
    STUCK_AFTER_S,
    broken_promises,
    flags,
    kept,
    table,
    training_time_ratio,
    with_run,
    write,
)
from slime.config.engines import CONTROL_FILE

STEPS = 3
BOOKS = {"issued": 9, "trained": 6, "filtered": 0, "dropped": {"surplus": 1}, "buffered": 1, "leased": 1}


def _run(directory: Path, rows: list[dict[str, Any]], books: dict[str, Any], leased: list[int]) -> Path:
    (directory / "rollout").mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = {"ledger": books, "leased": [[{"group_index": number}] * 4 for number in leased]}
    torch.save(state, directory / "rollout" / f"global_dataset_state_dict_{STEPS - 1}.pt")
    return directory


def _rows(rollouts: int = STEPS, steps: int = STEPS, staleness: float = 1.0) -> list[dict[str, Any]]:
    numbers = {"rollout": rollouts, "train": steps}
    return [
        {"axis": axis, "step": step, "time": 1.0, "rollout/staleness/min": staleness}
        for axis, count in numbers.items()
        for step in range(count)
    ]


def test_a_whole_run_has_broken_nothing(tmp_path):
    assert list(broken_promises(_run(tmp_path, _rows(), BOOKS, [7]), STEPS)) == []


@pytest.mark.parametrize(
    ("rows", "books", "leased", "told"),
    [
        (_rows(rollouts=2), BOOKS, [], "no row of rollout 2"),
        (_rows(steps=1), BOOKS, [], "no row of train 1, 2"),
        (_rows(steps=4), BOOKS, [], "rows of train that were not to be: [3]"),
        (_rows(staleness=-1.0), BOOKS, [], "rollout 0 has samples of weights that were not there yet"),
        (_rows(), BOOKS | {"trained": 5, "leased": 2}, [], "5 groups were trained on (wanted: 6)"),
        (_rows(), BOOKS | {"leased": 0}, [], "groups are lost or came from nowhere"),
        (_rows(), BOOKS, [7, 8, 7], "groups are out twice: [7]"),
    ],
)
def test_what_is_broken_is_told(rows, books, leased, told, tmp_path):
    found = list(broken_promises(_run(tmp_path, rows, books, leased), STEPS))
    assert found and found[0].startswith(told), found


def test_a_run_that_has_left_no_state_is_told_of(tmp_path):
    directory = _run(tmp_path, _rows(), BOOKS, [])
    next((directory / "rollout").iterdir()).unlink()
    (problem,) = broken_promises(directory, STEPS)
    assert problem.startswith("the state of the data cannot be read")


def test_results_add_up_and_a_run_replaces_the_one_of_its_layout_and_seed(tmp_path):
    def found(layout: str, seed: int, kind: str) -> dict[str, Any]:
        fault = dict(kind=kind, role="engine", pid=1, at_s=1.0, steps=1, restarts=0, recovered_s=2.0)
        return {"layout": layout, "plan": {"seed": seed}, "outcomes": [fault], "problems": []}

    output = tmp_path / "results.json"
    for one in (("a", 0, "kill"), ("b", 0, "kill"), ("a", 1, "stop"), ("b", 0, "pause")):
        write(output, with_run(kept(output, anew=False), found(*one)))
    results = json.loads(output.read_text())
    assert [(run["layout"], run["plan"]["seed"]) for run in results["runs"]] == [("a", 0), ("a", 1), ("b", 0)]
    assert results["faults"] == {"kill": 1, "stop": 1, "pause": 1}
    assert {(row["kind"], row["struck"]) for row in results["by_victim"]} == {
        *(("kill", 1), ("stop", 1), ("pause", 1))
    }
    assert kept(output, anew=True) == []


def test_the_share_of_time_that_trains_counts_losses_of_engines_and_ranks():
    def fault(role: str, kind: str, seconds: float | None) -> dict[str, Any]:
        return {"role": role, "kind": kind, "recovered_s": seconds}

    outcomes = [
        *(fault("engine", "kill", 10.0), fault("trainer rank", "stop", 50.0), fault("engine", "stop", None)),
        *(fault("engine", "pause", 500.0), fault("driver", "kill", 500.0)),
    ]
    found = training_time_ratio([{"outcomes": outcomes}], losses_per_hour=36)
    assert found["losses_seen"] == 2 and found["seconds_per_loss"] == 30
    assert found["training_time_ratio"] == pytest.approx(1 / 1.3, abs=1e-3)


def test_every_way_to_run_is_there():
    words = [" ".join(map(str, layout)) for layout in LAYOUTS.values()]
    for way in ("--colocate", "fsdp", "ppo", "--async", "fully_async", "per-node 1", "per-node 2"):
        assert any(way in flags for flags in words), way


def test_a_rank_that_hangs_is_known_for_it_before_the_run_counts_as_stuck(tmp_path):
    words = flags(tmp_path, LAYOUTS["one rank"], 3)
    minutes = int(words[words.index("--distributed-timeout-minutes") + 1])
    assert 60 * minutes < STUCK_AFTER_S


def test_somebody_has_engines_join_and_leave_as_long_as_the_run_can_be_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(come_and_go, "_PAUSE_S", (0.0, 0.001))
    monkeypatch.setattr(come_and_go, "ask", lambda words: (asked.append(words), len(asked) % 2)[1])
    with come_and_go.coming_and_going(tmp_path, seed=1) as done:
        time.sleep(0.05)
        assert asked == []
        (tmp_path / CONTROL_FILE).write_text("")
        deadline = time.monotonic() + 60
        while not {"add", "drain", "notice", "refused"} <= done.keys():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert done.total() == len(asked) and done["refused"] == (len(asked) + 1) // 2
    assert ["add", str(tmp_path)] in asked
    assert {word for words in asked if words[0] == "drain" for word in words[2:3]} <= {"0", "1", "2", "3"}


def test_the_figures_of_the_page_are_those_of_the_results():
    results = json.loads(RESULTS.read_text())
    page = (ROOT / "docs" / "fleets.md").read_text()
    assert table(results) in page
    faults = results["faults"]
    counts = ", ".join(f"{kind} {count}" for kind, count in faults.items())
    told = f"{len(results['runs'])} runs with {sum(faults.values())} faults ({counts})"
    assert told in " ".join(page.split())
    assert {run["layout"] for run in results["runs"]} == LAYOUTS.keys()
    assert not [run for run in results["runs"] if run["problems"] or run["differences"]]
    assert f"train for {results['training_time_ratio']:.2f} of its time" in page
