import json

import pytest

from slime.observability.jsonl import JsonlWriter, read_metrics


def write(path, *rows):
    writer = JsonlWriter(path)
    for row in rows:
        writer.write(*row)
    writer.close()


def test_a_row_is_on_disk_before_the_writer_is_closed(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write("train", 3, {"train/loss": 0.5})
    row = json.loads(path.read_text())
    assert (row["axis"], row["step"], row["train/loss"]) == ("train", 3, 0.5)
    assert row["time"] > 0
    writer.close()


def test_values_that_json_lacks_stay_visible(tmp_path):
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "metrics.jsonl"
    write(path, ("train", 0, {"a": float("nan"), "b": float("-inf"), "c": numpy.float32(0.5), "d": [1]}))
    row = read_metrics(path)["train"][0]
    assert (row["a"], row["b"], row["c"], row["d"]) == ("nan", "-inf", 0.5, [1])


def test_reserved_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="step"):
        write(tmp_path / "metrics.jsonl", ("train", 0, {"step": 1}))


def test_rows_of_a_step_are_merged_and_a_resumed_run_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, ("rollout", 1, {"a": 0.1}), ("rollout", 2, {"a": 0.2}), ("rollout", 2, {"b": 5}))
    write(path, ("rollout", 2, {"a": 0.9}), ("eval", 0, {"eval/x": 0.8}))
    metrics = read_metrics(path)
    assert {step: (row["a"], row.get("b")) for step, row in metrics["rollout"].items()} == {
        1: (0.1, None),
        2: (0.9, 5),
    }
    assert metrics["eval"][0]["eval/x"] == 0.8
    assert metrics["train"] == {}


def test_a_torn_last_line_is_skipped_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, ("train", 0, {"train/loss": 1.0}))
    complete = path.read_text()
    path.write_text(complete + '{"axis": "tra')
    assert list(read_metrics(path)["train"]) == [0]
    path.write_text(complete + "nonsense\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_metrics(path)


def test_a_resumed_run_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for torn in ("", '{"axis": "tra', "{"):
        with path.open("a") as file:
            file.write(torn)
        write(path, ("train", 0, {"a": 1}))
    assert len(path.read_text().splitlines()) == 3
    assert read_metrics(path)["train"][0]["a"] == 1
