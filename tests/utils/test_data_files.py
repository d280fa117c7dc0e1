import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.utils.data_files import PARQUET_BATCH, DataError, Records


def write(path, *numbers):
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in numbers))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "b.jsonl", 3, 4)
    write(tmp_path / "a.jsonl", 0, 1, 2)
    pq.write_table(pa.table({"n": [5, 6]}), tmp_path / "c.parquet")
    (tmp_path / "notes.txt").write_text("no data")
    (tmp_path / "old").mkdir()
    write(tmp_path / "old" / "a.jsonl", 9)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("", [0, 1, 2, 3, 4, 5, 6]),
        ("*.jsonl", [0, 1, 2, 3, 4]),
        ("**/a.jsonl", [0, 1, 2, 9]),
        ("[bc].*", [3, 4, 5, 6]),
        ("@[2:6]", [2, 3, 4, 5]),
        ("*.jsonl@[-3:]", [2, 3, 4]),
        ("*.jsonl@[3:4]", [3]),
        ("c.parquet@[1:]", [6]),
    ],
)
def test_directories_and_patterns_are_read_in_order(folder, pattern, wanted):
    records = Records(f"{folder}/{pattern}" if not pattern.startswith("@") else f"{folder}{pattern}")
    assert [record["n"] for _, record in records] == wanted
    assert [records[i][1]["n"] for i in range(len(records))] == wanted
    assert [records[i][0] for i in range(len(records))] == [where for where, _ in records]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    write(tmp_path / "part[1].jsonl", 1)
    write(tmp_path / "part1.jsonl", 2)
    assert Records(str(tmp_path / "part[1].jsonl"))[0][1] == {"n": 1}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.parq", "no such data file"),
        ("*.txt", "found suffix '.txt', expected .jsonl or .parquet"),
        ("old/deep", "no such data file"),
        ("empty", "a directory without .jsonl and .parquet files"),
        ("*.jsonl@[5:]", r"holds no record in the slice @\[5:\]"),
    ],
)
def test_a_path_without_data_is_named(folder, pattern, message):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=re.escape(str(folder)) + r"\S*: " + message):
        Records(f"{folder}/{pattern}")


def test_lines_are_numbered_as_in_the_file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('\n{"n": 1}\n  \n\n{"n": 2}\nnope\n[3]')
    records = Records(str(path))
    assert (records[0], records[1]) == ((f"{path}:2", {"n": 1}), (f"{path}:5", {"n": 2}))
    with pytest.raises(DataError, match=r"data.jsonl:6: not valid JSON"):
        records[2]
    with pytest.raises(DataError, match=r"data.jsonl:7: expected a JSON object, found list"):
        records[3]


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    write(path, 1, 2)
    records = Records(str(path))
    write(path, 1, 2, 3)
    with pytest.raises(DataError, match=r"data.jsonl: has changed since the run began to read it"):
        records[1]


def test_rows_of_a_large_table_are_found_by_number(tmp_path):
    count = 2 * PARQUET_BATCH + 5
    path = tmp_path / "data.parquet"
    pq.write_table(
        pa.table({"n": range(count), "tags": [["x"]] * count}), path, row_group_size=PARQUET_BATCH - 1
    )
    records = Records(str(path))
    for number in (count - 1, 0, PARQUET_BATCH - 1, PARQUET_BATCH, 2 * PARQUET_BATCH):
        assert records[number] == (f"{path}: row {number}", {"n": number, "tags": ["x"]})
