"""What becomes of the groups that a rollout leaves unfinished."""

from unittest.mock import MagicMock

import pytest

from slime.rollout.ledger import ABORTED, SPLIT
from slime.rollout.sglang_rollout import _Collection
from slime.utils.types import Sample


@pytest.mark.parametrize(("partial", "reason"), [(True, SPLIT), (False, ABORTED)])
def test_a_group_with_a_split_sample_is_dropped_for_a_reason_that_is_told(partial, reason):
    config, account = MagicMock(), MagicMock(keeps_finished=False)
    config.rollout.partial_rollout = partial
    unfinished = Sample(status=Sample.Status.ABORTED)
    taken = [Sample(), Sample()]
    collection = _Collection(config, 0, account)
    collection.settle([taken], [[unfinished, [unfinished, unfinished]]])
    account.drop.assert_called_once_with(taken, reason)
    assert not collection.spare
