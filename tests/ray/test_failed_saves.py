"""A disk that is full for a while ends no run; one that stays full, or is full at the end, does."""

from unittest.mock import MagicMock

import pytest

from slime.ray.failed_saves import FailedSaves
from slime.ray.synchronous import TrainingStep
from slime.ray.trainer_snapshots import TrainerSnapshots
from tests.run_args import config_with

FULL = "checkpoint /saved could not be written: rank 0: OSError: [Errno 28] No space left on device"


def test_failures_in_a_row_end_the_run_only_beyond_the_limit(caplog):
    saves = FailedSaves(most=2)
    for rollout_id in range(2):
        saves.note(rollout_id, [[FULL]], last=False)
    saves.note(2, [[None]], last=False)
    for rollout_id in range(3, 5):
        saves.note(rollout_id, [[FULL]], last=False)
    assert [record.args[:3] for record in caplog.records] == [(0, 1, 2), (1, 2, 2), (3, 1, 2), (4, 2, 2)]
    with pytest.raises(RuntimeError, match=r"Errno 28.*; 3 saves in a row failed \(--max-failed-saves 2\)"):
        saves.note(5, [[FULL]], last=False)


def test_what_is_not_known_yet_neither_counts_nor_forgives():
    saves = FailedSaves(most=1)
    saves.note(0, [[]], last=False)  # in the background
    saves.note(1, [[FULL]], last=False)  # that of rollout 0
    saves.note(2, [[]], last=False)
    with pytest.raises(RuntimeError, match="2 saves in a row"):
        saves.note(3, [[FULL]], last=False)


@pytest.mark.parametrize("of_roles", [[[FULL]], [[None, FULL]], [[FULL], [None]]])
def test_the_last_save_of_a_run_must_be_whole(of_roles):
    with pytest.raises(RuntimeError, match="the last save of the run"):
        FailedSaves(most=9).note(4, of_roles, last=True)


@pytest.mark.parametrize("most", [0, 9])
def test_an_earlier_save_that_failed_does_not_matter_at_the_end(most):
    FailedSaves(most).note(4, [[FULL, None]], last=True)


def test_a_whole_save_forgives_those_before_it_also_where_it_is_told_with_the_next():
    """Of one that is written in the background the next save tells, which may fail before it begins."""
    saves = FailedSaves(most=2)
    saves.note(0, [[FULL]], last=False)
    saves.note(1, [[FULL]], last=False)
    saves.note(3, [[None, FULL]], last=False)
    saves.note(4, [[FULL]], last=False)
    with pytest.raises(RuntimeError, match="3 saves in a row"):
        saves.note(5, [[FULL]], last=False)


def test_a_checkpoint_and_an_export_that_fail_together_are_one_save():
    saves = FailedSaves(most=1)
    saves.note(0, [[FULL, FULL]], last=False)
    with pytest.raises(RuntimeError, match="2 saves in a row"):
        saves.note(1, [[FULL, FULL]], last=False)


@pytest.mark.parametrize("unsaved", [None, FULL])
def test_weights_are_not_saved_without_their_position_in_the_data(unsaved, caplog):
    actor, critic, rollout = MagicMock(), MagicMock(), MagicMock()
    rollout.unsaved.return_value = unsaved
    actor.try_to_save.return_value, critic.try_to_save.return_value = [None], []
    config = config_with(save="/saved", save_interval=1, num_rollout=3)
    snapshots = TrainerSnapshots(config, actor, critic, rollout)
    TrainingStep(config, actor, critic, rollout, snapshots, None).run(0, [])
    assert actor.try_to_save.called is critic.try_to_save.called is (unsaved is None)
    assert actor.train.called
    assert len(caplog.records) == (unsaved is not None)
