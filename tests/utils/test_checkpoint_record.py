"""What is damaged of a checkpoint is told, whatever happened to its files; only older ones are removed."""

import json

import pytest

from slime.utils import checkpoint_record
from slime.utils.checkpoint_record import damage, iterations, remove_older, take_sums, write_record

FILES = (
    "metadata.json",
    "common.pt",
    ".metadata",
    "__0_0.distcp",
    "__1_0.distcp",
    "ref/__1_3.distcp",
    "rng_00001.pt",
)


@pytest.fixture
def checkpoint(tmp_path):
    """Two ranks wrote it."""
    path = tmp_path / "iter_0000003"
    for number, name in enumerate(FILES):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(bytes(range(100 + number)))
    for rank in (1, 0):
        write_record(path, rank, 2)
    return path


def test_each_file_is_recorded_once_by_who_wrote_it(checkpoint):
    records = [json.loads((checkpoint / f"record_0000{rank}.json").read_text()) for rank in (0, 1)]
    assert [record["ranks"] for record in records] == [2, 2]
    assert records[1]["files"].keys() == {"__1_0.distcp", "ref/__1_3.distcp", "rng_00001.pt"}
    assert records[0]["files"].keys() == set(FILES) - records[1]["files"].keys()


def test_what_was_summed_before_is_read_again_only_if_it_has_changed(checkpoint, monkeypatch):
    known = take_sums(checkpoint, 0)
    (checkpoint / "common.pt").write_bytes(b"other")
    (checkpoint / "made_later.json").write_text("{}")
    read, checksum = [], checkpoint_record._checksum
    monkeypatch.setattr(checkpoint_record, "_checksum", lambda path: read.append(path.name) or checksum(path))
    write_record(checkpoint, 0, 2, known)
    assert sorted(read) == ["common.pt", "made_later.json"]
    assert list(damage(checkpoint, checksums=True)) == []
    assert (checkpoint / "record_00000.json").read_text().count("xxh3") == len(known) + 1


@pytest.mark.parametrize("checksums", [False, True])
def test_a_whole_one_is_not_damaged(checkpoint, checksums):
    (checkpoint / "made_later.json").write_text("{}")
    assert list(damage(checkpoint, checksums)) == []


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(checkpoint, name):
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content[:-1])
    assert list(damage(checkpoint)) == [f"{name} has {len(content) - 1} bytes (wanted: {len(content)})"]
    (checkpoint / name).write_bytes(content[:-1] + b"\xff")
    assert list(damage(checkpoint)) == []
    assert list(damage(checkpoint, checksums=True)) == [f"{name} has other content than was written"]
    (checkpoint / name).unlink()
    assert list(damage(checkpoint)) == [f"{name} is missing"]


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"ranks": "2", "files": {}}', '{"ranks": 2, "files": {"a": {}}}']
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_record_is_named(checkpoint, content, rank):
    record = checkpoint / f"record_0000{rank}.json"
    record.unlink()
    if content is not None:
        record.write_text(content)
    assert next(damage(checkpoint)) == f"record_0000{rank}.json is missing or cannot be read"


def test_of_what_others_wrote_nothing_is_known(checkpoint):
    for record in checkpoint.glob("record_*"):
        record.unlink()
    (checkpoint / "common.pt").unlink()
    assert list(damage(checkpoint, checksums=True)) == []


@pytest.fixture
def root(tmp_path):
    """Iterations 1 to 5, of which 2 is incomplete, and what is none."""
    for number in range(1, 6):
        (tmp_path / f"iter_000000{number}").mkdir()
        if number != 2:
            (tmp_path / f"iter_000000{number}/metadata.json").write_text("{}")
    for name in ("iter_0000004.tmp", "iter_0000001.replaced", "critic", "iter_x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text("{}")
    return tmp_path


def test_complete_ones_are_found_newest_first(root):
    assert list(iterations(root)) == [5, 4, 3, 1]


@pytest.mark.parametrize(
    ("iteration", "keep", "left"),
    [(5, 2, [5, 4]), (5, 3, [5, 4, 3]), (4, 2, [5, 4, 3]), (5, 9, [5, 4, 3, 1])],
)
def test_older_ones_are_removed(root, iteration, keep, left):
    (root / "iter_0000000.removed").mkdir()  # by a run that was killed meanwhile
    others = {
        path.name for path in root.iterdir() if path.name not in map("iter_{:07d}".format, (1, 3, 4, 5))
    }
    remove_older(root, iteration, keep)
    assert list(iterations(root)) == left
    there = {path.name for path in root.iterdir()}
    assert others - there == {"iter_0000000.removed"}
