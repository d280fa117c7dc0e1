"""What becomes of the groups that a rollout leaves unfinished."""

from unittest.mock import MagicMock

import pytest

from slime.rollout.attempts import flatten
from slime.rollout.sglang_rollout import _Collection
from slime.utils.types import EARLIER_TOKENS, Sample
from tests.run_args import config_with


def _group(number, *, finished, split=False):
    status = Sample.Status.COMPLETED if finished else Sample.Status.ABORTED
    sample = Sample(index=number, status=status, reward=1.0 if finished else None, response_length=3)
    return [[sample, sample]] if split else [sample]


@pytest.mark.parametrize(
    ("keeps", "partial", "finished", "split", "fate"),
    [
        (True, True, True, False, "kept"),
        (True, True, True, True, "kept"),
        (True, False, True, True, "kept"),
        (False, False, True, False, "surplus"),
        (False, False, False, False, "aborted"),
        (True, False, False, False, "aborted"),
        (True, False, False, True, "aborted"),
        (False, True, False, False, "kept"),
        (False, True, False, True, "split"),
    ],
)
def test_what_becomes_of_a_group_that_was_still_running(keeps, partial, finished, split, fate):
    account = MagicMock(keeps_finished=keeps)
    flags = {"keep_surplus_groups": True, "mask_offpolicy_in_partial_rollout": False}
    config = config_with(**flags, partial_rollout=partial)
    running = [[Sample(index=number)] for number in (7, 5)]
    now = [_group(number, finished=finished, split=split) for number in (7, 5)]
    _Collection(config, 2, account).settle(running, now)
    dropped = [tuple(call.args) for call in account.drop.call_args_list]
    given_back = [call.args for call in account.give_back.call_args_list]
    if fate == "kept":  # in their order, and as they were taken
        assert dropped == [] and given_back == [([now[1], now[0]], [running[1], running[0]])]
        assert {sample.metadata[EARLIER_TOKENS] for group in now for sample in flatten(group)} == {3}
    else:
        assert dropped == [(group, fate) for group in running] and given_back == []
