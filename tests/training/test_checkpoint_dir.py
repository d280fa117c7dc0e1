"""A checkpoint becomes the latest or nothing changes, whatever was left there and whatever fails."""

from pathlib import Path

import pytest

from slime.training import checkpoint_dir
from slime.training.checkpoint_dir import MARKER, find_checkpoint, iteration_dir, publish


def _written(path, content):
    path.mkdir()
    (path / "metadata.json").write_text(content)
    return path


def _latest(root):
    return (find_checkpoint(root)[1] / "metadata.json").read_text()


@pytest.fixture(params=[True, False], ids=["exchanged", "renamed"])
def saved(tmp_path, request, monkeypatch):
    """Iteration 2 is there, and another one of it is written; the file system can exchange names, or not."""
    if not request.param:
        monkeypatch.setattr(checkpoint_dir, "_exchange", lambda one, other: False)
    final = iteration_dir(tmp_path, 2)
    publish(_written(final.with_suffix(".tmp"), "old"), final, 2)
    return _written(final.with_suffix(".tmp"), "new"), final


def test_what_a_killed_run_left_is_in_no_later_ones_way(saved, tmp_path):
    temporary, final = saved
    _written(final.with_suffix(".replaced"), "older")
    publish(temporary, final, 2)
    assert _latest(tmp_path) == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [final.name, MARKER]


def test_no_moment_is_without_the_checkpoint_that_is_replaced(tmp_path, monkeypatch):
    final = iteration_dir(tmp_path, 2)
    temporary = final.with_suffix(".tmp")
    publish(_written(temporary, "old"), final, 2)
    _written(temporary, "new")
    renamed, rename = [], Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda path, target: renamed.append(path.name) or rename(path, target)
    )
    publish(temporary, final, 2)
    assert _latest(tmp_path) == "new"
    assert renamed == []  # of names that are exchanged none is ever missing


def test_publishing_again_does_not_bring_the_old_one_back(saved, tmp_path):
    temporary, final = saved
    for _ in range(2):
        publish(temporary, final, 2)
        assert _latest(tmp_path) == "new"


def test_a_checkpoint_that_could_not_be_replaced_is_still_the_latest(tmp_path, monkeypatch):
    final = iteration_dir(tmp_path, 2)
    temporary = final.with_suffix(".tmp")
    publish(_written(temporary, "old"), final, 2)
    _written(temporary, "new")
    monkeypatch.setattr(checkpoint_dir, "_exchange", lambda one, other: False)
    rename = Path.rename

    def fail(path, target):
        if path == temporary:
            raise OSError("no room for a name")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no room for a name"):
        publish(temporary, final, 2)
    assert _latest(tmp_path) == "old"
    monkeypatch.setattr(Path, "rename", rename)
    publish(temporary, final, 2)
    assert _latest(tmp_path) == "new"


def test_a_checkpoint_that_is_gone_before_it_has_its_name_is_not_marked(saved, tmp_path):
    temporary, _ = saved
    with pytest.raises(FileNotFoundError):
        publish(temporary.with_name("iter_0000003.tmp"), iteration_dir(tmp_path, 3), 3)
    assert _latest(tmp_path) == "old"
