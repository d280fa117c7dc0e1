import base64
import gc
import subprocess

import numpy as np
import pytest

from slime.config.critic import trains_actor
from slime.ray.synchronous import evaluates_at_start
from slime.utils.misc import (
    SingletonMeta,
    decode_int32_meta_array,
    exec_command,
    should_run_periodic_action,
    spare_collector,
)
from tests.run_args import config_with


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
    config = config_with(eval_interval=interval, skip_eval_before_train=skip).evaluation
    assert evaluates_at_start(config, num_rollout, start, None) is wanted


@pytest.mark.parametrize(
    ("critic", "alone", "never", "trained"),
    [
        *((True, 0, False, [0, 1, 2]), (True, 2, False, [2]), (True, 0, True, []), (True, 9, False, [])),
        *((False, 2, False, [0, 1, 2]), (False, 0, True, [0, 1, 2])),
    ],
)
def test_the_actor_trains_after_the_rollouts_of_the_critic_alone(critic, alone, never, trained):
    flags = dict(use_critic=critic, num_critic_only_steps=alone, critic_train_only=never)
    assert [i for i in range(3) if trains_actor(config_with(**flags).critic, i)] == trained


def test_a_singleton_is_made_once_until_it_is_cleared():
    class One(metaclass=SingletonMeta):
        def __init__(self, value):
            self.value = value

    class Child(One): ...

    assert One(1) is One(2) and One(2).value == 1
    assert Child(3).value == 3 and One(4).value == 1
    One.clear()
    assert (One(5).value, Child(5).value) == (5, 3)


def test_a_singleton_whose_making_fails_is_made_again():
    class Picky(metaclass=SingletonMeta):
        def __init__(self, value):
            if value < 0:
                raise ValueError(value)

    with pytest.raises(ValueError):
        Picky(-1)
    assert Picky(1) is Picky(-1)
    Picky.clear()


def test_arrays_of_an_answer_are_decoded_under_the_first_name_that_is_there():
    array = np.array([1, -2, 3], np.int32)
    meta_info = {"old": None, "new": base64.b64encode(array).decode(), "raw": array.tobytes()}
    assert decode_int32_meta_array(meta_info, ("old", "new")).tolist() == [1, -2, 3]
    assert decode_int32_meta_array(meta_info, "raw").tolist() == [1, -2, 3]
    assert decode_int32_meta_array(meta_info, ["old", "none"]) is None


def test_commands_run_in_bash_and_failures_are_errors():
    assert exec_command("printf '%s' $((1 + 1))", capture_output=True) == "2"
    assert exec_command("true") is None
    with pytest.raises(subprocess.CalledProcessError):
        exec_command("false")


def test_the_collector_leaves_what_there_is_alone() -> None:
    thresholds = gc.get_threshold()
    gc.unfreeze()  # what tests/conftest.py has frozen
    try:
        spare_collector()
        assert gc.get_freeze_count() > 10_000 and gc.isenabled()
    finally:
        gc.freeze()
        gc.set_threshold(*thresholds)
