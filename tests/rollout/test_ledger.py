import pytest

from slime.rollout.base_types import RolloutError
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.ledger import Ledger, LedgerError, RolloutAccount


def test_a_group_without_a_fate_is_noticed(make_args):
    account = RolloutAccount(RolloutDataSourceWithBuffer(make_args()))
    account.take(3)
    account.trained += 2
    with pytest.raises(LedgerError, match="3 groups taken, but 2 trained"):
        account.close()


def test_groups_that_vanish_from_the_buffer_are_noticed(make_args):
    source = RolloutDataSourceWithBuffer(make_args())
    account = RolloutAccount(source)
    account.give_back(account.take(1))
    source.buffer.clear()
    with pytest.raises(LedgerError, match="0 groups buffered leaves 1 unaccounted"):
        account.close()


def test_a_source_that_runs_dry_is_an_error():
    class Dry:
        def get_samples(self, num_samples):
            return []

    with pytest.raises(RolloutError, match=r"Dry.get_samples\(4\) returned no group"):
        RolloutAccount(Dry()).take(4)


def test_trained_groups_that_fill_no_step_are_dropped():
    ledger = Ledger(issued=5, trained=4, filtered=1)
    ledger.drop_trained(3)
    assert ledger == Ledger(issued=5, trained=1, filtered=1, dropped=3)
    ledger.drop_trained(2)
    assert (ledger.trained, ledger.dropped, ledger.unaccounted(0)) == (0, 4, 0)
