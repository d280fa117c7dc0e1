"""A checkpoint becomes the latest or nothing changes, whatever was left there and whatever fails."""

from pathlib import Path

import pytest

from slime.training.checkpoint_dir import MARKER, find_checkpoint, iteration_dir, publish


def _written(path, content):
    path.mkdir()
    (path / "metadata.json").write_text(content)
    return path


def _latest(root):
    return (find_checkpoint(root)[1] / "metadata.json").read_text()


@pytest.fixture
def saved(tmp_path):
    """Iteration 2 is there, and another one of it is written."""
    final = iteration_dir(tmp_path, 2)
    publish(_written(final.with_suffix(".tmp"), "old"), final, 2)
    return _written(final.with_suffix(".tmp"), "new"), final


def test_what_a_killed_run_left_is_in_no_later_ones_way(saved, tmp_path):
    temporary, final = saved
    _written(final.with_suffix(".replaced"), "older")
    publish(temporary, final, 2)
    assert _latest(tmp_path) == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [final.name, MARKER]


def test_a_checkpoint_that_could_not_be_replaced_is_still_the_latest(saved, tmp_path, monkeypatch):
    temporary, final = saved
    rename = Path.rename

    def fail(path, target):
        if path == temporary:
            raise OSError("no room for a name")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no room for a name"):
        publish(temporary, final, 2)
    assert _latest(tmp_path) == "old"
    monkeypatch.undo()
    publish(temporary, final, 2)
    assert _latest(tmp_path) == "new"


def test_a_checkpoint_that_is_gone_before_it_has_its_name_is_not_marked(saved, tmp_path):
    temporary, _ = saved
    with pytest.raises(FileNotFoundError):
        publish(temporary.with_name("iter_0000003.tmp"), iteration_dir(tmp_path, 3), 3)
    assert _latest(tmp_path) == "old"
