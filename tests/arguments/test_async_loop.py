"""The asynchronous loop tells each rollout how many weight updates come before it is trained on."""

from argparse import Namespace
from unittest.mock import MagicMock

import pytest

import train_async


@pytest.mark.parametrize(("interval", "ahead"), [(1, [0, 1, 1, 1, 1]), (2, [0, 0, 1, 0, 1])])
def test_a_rollout_knows_of_the_update_before_its_training(interval, ahead):
    args = Namespace(
        num_rollout=5,
        update_weights_interval=interval,
        eval_interval=None,
        save_interval=None,
        skip_eval_before_train=True,
        critic_train_only=False,
        num_critic_only_steps=0,
    )
    actor, rollout, version, trained_at, made_for = MagicMock(), MagicMock(), [0], [], []
    actor.start_rollout_id, rollout.num_rollout_per_epoch = 0, None
    actor.update_weights.side_effect = lambda: version.__setitem__(0, version[0] + 1)
    actor.train.side_effect = lambda *_: trained_at.append(version[0])

    def generate(rollout_id, updates_ahead=0):
        made_for.append((version[0], updates_ahead))
        return MagicMock()

    rollout.async_generate.side_effect = generate
    train_async.train(args, actor, MagicMock(), rollout, MagicMock())
    assert [updates for _, updates in made_for] == ahead
    assert [made + updates for made, updates in made_for] == trained_at


def test_a_bound_that_this_loop_cannot_hold_is_refused():
    flags = Namespace(colocate=False, num_rollout=3, max_staleness=0)
    assert "--max-staleness 0: train_async.py updates" in (train_async.refusal(flags) or "")
    flags.max_staleness = 1
    assert train_async.refusal(flags) is None
