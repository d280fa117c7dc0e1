from argparse import Namespace

import pytest

from slime.utils.misc import evaluates_at_start, should_run_periodic_action, trains_actor


@pytest.mark.parametrize(
    ("interval", "per_epoch", "last", "due_after"),
    [
        (None, 2, 4, []),
        (3, None, None, [2, 5]),
        (3, 2, None, [1, 2, 3, 5]),
        (3, None, 5, [2, 4, 5]),
    ],
)
def test_actions_are_due_at_intervals_epochs_and_the_end(interval, per_epoch, last, due_after):
    assert [i for i in range(6) if should_run_periodic_action(i, interval, per_epoch, last)] == due_after


@pytest.mark.parametrize(
    ("interval", "num_rollout", "skip", "start", "wanted"),
    [
        (None, 10, False, 0, False),
        (2, 10, False, 0, True),
        (2, 10, True, 0, False),
        (2, 0, True, 0, True),  # evaluation only
        (2, 0, True, 3, True),  # of a checkpoint
        (2, 10, True, 4, True),  # due at the checkpoint: its result may be lost
        (2, 10, False, 3, False),
    ],
)
def test_what_a_run_evaluates_before_its_first_rollout(interval, num_rollout, skip, start, wanted):
    args = Namespace(eval_interval=interval, num_rollout=num_rollout, skip_eval_before_train=skip)
    assert evaluates_at_start(args, start, None) is wanted


@pytest.mark.parametrize(
    ("alone", "never", "trained"), [(0, False, [0, 1, 2]), (2, False, [2]), (0, True, []), (9, False, [])]
)
def test_the_actor_trains_after_the_rollouts_of_the_critic_alone(alone, never, trained):
    args = Namespace(num_critic_only_steps=alone, critic_train_only=never)
    assert [i for i in range(3) if trains_actor(args, i)] == trained
