import pytest
import torch

from slime.training.versions import TRAINED, WeightVersions
from slime.utils import tensor_backper
from slime.utils.tensor_backper import TensorBackuper


def test_tags_are_independent_and_restored_in_place():
    live = torch.tensor([1.0])
    backups = TensorBackuper(lambda: [("weight", live)])
    backups.backup("actor")
    live.fill_(2)
    backups.backup("ref")
    backups.restore("actor")
    assert live.item() == 1
    backups.copy(src_tag="actor", dst_tag="ref")
    live.fill_(3)
    backups.restore("ref")
    assert live.item() == 1
    assert backups.backup_tags == ["actor", "ref"]


def test_what_a_gpu_has_yet_to_read_is_not_overwritten(monkeypatch):
    """A copy from the host that was queued reads what is there when the GPU comes to it."""
    live, queued = torch.tensor([1.0]), []
    backups = TensorBackuper(lambda: [("weight", live)])
    backups.backup("actor")
    live.fill_(2)
    monkeypatch.setattr(tensor_backper, "synchronize", lambda: queued.append(live.item()))
    backups.restore("actor")
    assert queued == [2, 1]


def test_another_version_is_in_place_only_for_a_while():
    live = torch.ones(3)
    backups = TensorBackuper(lambda: [("weight", live)])
    backups.backup("ref")
    live.fill_(2)
    with pytest.raises(RuntimeError, match="full"), backups.swapped("ref", "trained"):
        assert live.tolist() == [1, 1, 1]
        raise RuntimeError("full")
    assert live.tolist() == [2, 2, 2]


def test_a_version_is_entered_and_left_again_even_by_a_failure():
    live = torch.ones(3)
    versions = WeightVersions(lambda: [("weight", live)])
    versions.backup("ref")
    live.fill_(2)
    versions.backup(TRAINED)
    with versions.entered(TRAINED):
        assert live.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="stop"), versions.entered("ref"):
        assert live.tolist() == [1, 1, 1]
        raise RuntimeError("stop")
    assert live.tolist() == [2, 2, 2]
