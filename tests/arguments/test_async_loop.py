"""Tests when the asynchronous loop updates the weights, and what each rollout is told of it."""

from unittest.mock import MagicMock

import pytest

import train_async
from tests.run_args import config_with, run_args


def flags(interval):
    return config_with(
        num_rollout=5,
        update_weights_interval=interval,
        eval_interval=None,
        save_interval=None,
        skip_eval_before_train=True,
        use_critic=False,
    )


def stand_ins():
    """A trainer and engines that start from nothing."""
    actor, rollout = MagicMock(), MagicMock()
    actor.start_rollout_id, rollout.num_rollout_per_epoch = 0, None
    return actor, rollout


@pytest.mark.parametrize(("interval", "ahead"), [(1, [0, 1, 1, 1, 1]), (2, [0, 0, 1, 0, 1])])
def test_a_rollout_knows_of_the_update_before_its_training(interval, ahead):
    (actor, rollout), version, trained_at, made_for = stand_ins(), [0], [], []
    actor.update_weights.side_effect = lambda: version.__setitem__(0, version[0] + 1)
    actor.train.side_effect = lambda *_: trained_at.append(version[0])

    def generate(rollout_id, updates_ahead=0):
        made_for.append((version[0], updates_ahead))
        return MagicMock()

    rollout.async_generate.side_effect = generate
    train_async.train(flags(interval), actor, MagicMock(), rollout, MagicMock())
    assert [updates for _, updates in made_for] == ahead
    assert [made + updates for made, updates in made_for] == trained_at


@pytest.mark.parametrize("interval", [1, 2])
def test_no_update_begins_while_a_rollout_is_generated(interval):
    (actor, rollout), under_way, found = stand_ins(), set(), []
    actor.update_weights.side_effect = lambda: found.append(set(under_way))

    def generate(rollout_id, updates_ahead=0):
        under_way.add(rollout_id)
        return MagicMock(result=lambda: under_way.discard(rollout_id))

    rollout.async_generate.side_effect = generate
    train_async.train(flags(interval), actor, MagicMock(), rollout, MagicMock())
    assert found == [set()] * (1 + 5 // interval)


def test_a_bound_that_this_loop_cannot_hold_is_refused():
    args = run_args(colocate=False, num_rollout=3, max_staleness=0)
    (message,) = train_async.refusal(args)
    assert message.startswith("--max-staleness 0: train_async.py updates")
    args.max_staleness = 1
    assert list(train_async.refusal(args)) == []
