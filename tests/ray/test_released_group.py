"""A trainer that is there from `onload` to `offload`, as the driver sees it, without processes."""

from unittest.mock import MagicMock

import pytest

from slime.observability.run_log import RunLog
from slime.observability.tracking import Tracker
from slime.ray import train_group
from slime.ray.released_group import ReleasedTrainGroup
from tests.ray.test_train_group import OfOneRank, OneProcess
from tests.run_args import config_with


class OfReleased(ReleasedTrainGroup, OfOneRank):
    """Whose answers are there at once."""


@pytest.fixture
def started(monkeypatch):
    """`started()`: a group that has begun with the weights of a checkpoint."""
    monkeypatch.setattr(train_group, "ProcessWatch", MagicMock())
    monkeypatch.setattr(train_group, "RankProcesses", OneProcess)
    monkeypatch.setattr(train_group.ray, "kill", lambda actor: actor.kill())

    def start(**flags):
        given = dict(start_rollout_id=None, train_timeout=1, cluster_timeout=1, load="first", ckpt_step=7)
        given |= dict(release_train=True, save="saved", finetune=True)
        group = OfReleased(config_with(**given | flags), [0], MagicMock(), RunLog(Tracker([])))
        group._pending_init = [4]
        group.wait_ready()
        return group

    return start


@pytest.mark.parametrize("without_optimizer", [False, True])
def test_released_ranks_start_again_from_their_last_save_and_before_it_as_the_run_did(
    started, without_optimizer
):
    group = started(no_save_optim=without_optimizer or None)
    first = group._actors[0]
    group._version = 3
    group.onload()
    assert group._actors == [first]  # it is there
    group.offload()
    group.offload()
    first.kill.assert_called_once_with()
    assert group._actors == [] and group.checkpoints == "saved" and group._sends_weights()
    group.onload()
    again = group._actors[0]
    assert (again.args.load, again.args.ckpt_step, again.args.finetune) == ("first", 7, True)
    again.go_on.remote.assert_called_once_with(3, False)
    again.save_model.remote.return_value = [None]
    assert group.try_to_save(4) == [None]
    again.save_model.remote.assert_called_once_with(4, True, 5, None)  # it waits
    again.save_model.remote.return_value = ["no space"]
    group.try_to_save(5)
    group.offload()
    group.onload()
    args = group._actors[0].args
    assert (args.load, args.ckpt_step, args.finetune, args.no_load_rng) == ("saved", 4, False, False)
    assert args.no_load_optim is without_optimizer
    assert group._watch.wait_until_gone.call_count == 2


def test_the_policy_of_ranks_that_come_back_is_not_proven_again(started):
    group = started()
    group._unproven = 5
    group.offload()
    group.onload()
    assert group._unproven == 5
    group._watch.wait_until_gone.assert_called_once_with(1)
