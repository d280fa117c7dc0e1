import copy
import threading

import pytest

from slime.rollout.base_types import RolloutError
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.data_state import read_state, state_path
from slime.rollout.ledger import Ledger, LedgerError, RolloutAccount, ledger_metrics
from slime.utils.types import Sample
from tests.rollout import plugins


@pytest.fixture
def source(make_args):
    return RolloutDataSourceWithBuffer(make_args())


def numbers(groups):
    return [group[0].group_index for group in groups]


def restarted(source):
    source.save(0)
    again = type(source)(source.args)
    again.load(0)
    return again


def test_every_fate_is_booked_and_the_books_balance_at_each_step(source):
    account, books = RolloutAccount(source), source.ledger
    groups = account.take(5)
    assert (books.issued, books.leased, len(account)) == (5, 5, 5)
    steps = [
        lambda: account.train(groups[0]),
        lambda: account.filter(groups[1]),
        lambda: account.drop(groups[2], "too_old"),
        lambda: account.give_back(groups[3:4]),
        lambda: account.train(groups[4]),
    ]
    for step in steps:
        assert books.balanced
        step()
    account.close()
    assert books == Ledger(5, trained=2, filtered=1, dropped={"too_old": 1}, buffered=1, leased=0)
    assert not books.records


def test_a_group_without_a_fate_is_noticed(source):
    account = RolloutAccount(source)
    for group in account.take(3)[:2]:
        account.train(group)
    with pytest.raises(LedgerError, match=r"1 groups were taken and got no fate: the group of sample 4$"):
        account.close()


def test_a_group_has_one_fate(source):
    account = RolloutAccount(source)
    (group,) = account.take(1)
    account.train(group)
    for again in (
        account.train,
        account.filter,
        lambda g: account.drop(g, "x"),
        RolloutAccount(source).train,
    ):
        with pytest.raises(LedgerError, match="the group of sample 0 is not leased here"):
            again(group)


def test_a_group_that_is_given_out_twice_is_noticed():
    group = [Sample(index=7)]

    class Stuck:
        def get_samples(self, num_samples):
            return [group]

    account = RolloutAccount(Stuck())
    account.take(1)
    with pytest.raises(LedgerError, match="the group of sample 7 was given out twice"):
        account.take(1)


def test_groups_that_vanish_from_the_buffer_are_noticed(source):
    account = RolloutAccount(source)
    account.give_back(account.take(1))
    source.buffer.clear()
    with pytest.raises(LedgerError, match=r"1 groups should wait .* get_buffer_length\(\) is 0"):
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
    assert ledger == Ledger(issued=5, trained=1, filtered=1, dropped={"no_step": 3})
    ledger.drop_trained(2)
    assert ledger.trained == 0 and ledger.dropped == {"no_step": 4} and ledger.balanced


def test_dropped_groups_are_told_once_by_their_reasons(make_args):
    source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path="tests.rollout.plugins.newest_only"))
    account = RolloutAccount(source)
    groups = account.take(4)
    account.drop(groups[0], "too_old")
    account.give_back(groups[1:])
    account.train(account.take(1)[0])
    source.ledger.drop_trained(1)
    assert account.metrics() == {"rollout/dropped/buffer_filter": 2, "rollout/dropped/too_old": 1}
    assert account.metrics() == {}
    account.take_for_hook(1)
    assert account.metrics() == {"rollout/dropped/hook": 1}


def test_what_is_leased_at_a_save_comes_back_first_and_as_it_was_given_out(source):
    account = RolloutAccount(source)
    begun, trained, waiting, held, held_too = account.take(5)
    begun[0].append_response_tokens(tokens=[5], log_probs=[-1.0], text="x")
    account.give_back([begun, waiting])
    account.train(trained)
    (again,) = account.take(1)
    assert again is begun
    as_given = copy.deepcopy([held, held_too, begun])
    begun[0].append_response_tokens(tokens=[6], log_probs=[-1.0], text="y")
    begun[0].tokens.append(9)
    begun[0].metadata["mine"] = True
    held[0].prefix_cache_info.cached_tokens = 3
    held[1].prompt += "!"

    source = restarted(source)
    assert source.ledger == Ledger(issued=5, trained=1, buffered=4, leased=0)
    groups = RolloutAccount(source).take(6)
    assert groups[:3] == as_given
    assert numbers(groups) == [3, 4, 0, 2, 5, 6]


def test_a_second_restart_brings_back_what_was_not_given_out_yet(make_args):
    source = RolloutDataSource(make_args())
    RolloutAccount(source).take(4)
    source = restarted(source)
    account = RolloutAccount(source)
    first, second = account.take(2)
    account.train(second)
    source = restarted(source)
    assert numbers(RolloutAccount(source).take(5)) == [0, 2, 3, 4, 5]
    assert source.ledger.balanced and source.ledger.issued == 6
    del first


def test_groups_with_samples_that_were_split_come_back(source):
    account = RolloutAccount(source)
    (taken,) = account.take(1)
    split = [[taken[0], copy.deepcopy(taken[0])], taken[1]]
    account.give_back([split], [taken])
    account.close()
    assert restarted(source).buffer == [split]
    (again,) = account.take(1)
    assert again is split
    assert restarted(source).get_samples(1) == [split]


def test_code_without_an_account_is_counted_and_brings_nothing_back(source):
    groups = source.get_samples(4)
    source.add_samples(groups[:1])
    source.add_samples([[Sample(index=90), Sample(index=91)]])
    assert source.ledger == Ledger(issued=4, buffered=2, leased=2)
    source = restarted(source)
    assert numbers(source.get_samples(3)) == [0, None, 4]
    assert source.ledger == Ledger(issued=5, leased=5) and source.ledger.balanced


def test_groups_of_somebody_elses_making_are_new(source):
    source.add_samples([[Sample(index=90), Sample(index=91)]])
    assert source.ledger == Ledger(issued=1, buffered=1)


@pytest.mark.parametrize("kind", [plugins.OwnOrder, plugins.OwnBuffer])
def test_a_subclass_that_hides_its_moves_has_books_that_balance(make_args, kind):
    source = kind(make_args())
    account = RolloutAccount(source)
    groups = account.take(4)
    account.give_back(groups[2:])
    account.train(groups[0])
    assert source.ledger.balanced
    again = account.take(3)
    assert again[:2] == groups[2:]
    for group in [groups[1], *again]:
        account.train(group)
    account.close()
    assert source.ledger.trained == 5 and source.ledger.leased == 0


def test_a_state_of_before_there_were_leases_is_read(source):
    source.add_samples(source.get_samples(6)[:2])
    state = source.state_dict()
    del state["leased"]
    state["ledger"] = {"issued": 6, "trained": 1, "filtered": 0, "dropped": 3}
    source.load_state_dict(state)
    assert source.ledger == Ledger(issued=6, trained=1, dropped={"unknown": 3}, buffered=2, leased=0)


def test_a_save_beside_a_working_thread_has_each_group_once(make_args):
    args = make_args()
    source, done = RolloutDataSourceWithBuffer(args), threading.Event()

    def work():
        account = RolloutAccount(source)
        held = []
        while not done.is_set():
            held += account.take(2)
            account.give_back([held.pop(0)])
            account.train(held.pop(0))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(50):
            source.save(0)
            state = read_state(state_path(args.save, 0))
            out = [group[0]["group_index"] for group in [*state["leased"], *state["buffer"]]]
            books = state["ledger"]
            assert len(out) == len(set(out)) == books["buffered"] + books["leased"]
            assert books["issued"] == state["sample_group_index"] == books["trained"] + len(out)
    finally:
        done.set()
        worker.join()


@pytest.mark.parametrize("wrong", [[], (1, 2), Sample(), None])
def test_what_is_no_group_is_named(wrong):
    class Odd:
        def get_samples(self, num_samples):
            return [[Sample(index=1)], wrong]

    account = RolloutAccount(Odd())
    with pytest.raises(RolloutError, match=r"Odd.get_samples\(2\) returned .* expected lists of samples"):
        account.take(2)
    assert len(account) == 0 and not account.keeps_finished


def test_a_few_of_those_without_a_fate_are_named(source):
    account = RolloutAccount(source)
    account.take(9)
    said = "9 groups were taken and got no fate: " + ", ".join(
        f"the group of sample {2 * i}" for i in range(8)
    )
    with pytest.raises(LedgerError) as error:
        account.close()
    assert str(error.value) == said


def test_groups_are_named_by_their_first_sample(source):
    account = RolloutAccount(source)
    for group, name in (([[Sample(index=7), Sample()], Sample()], "7"), ([Sample()], "None")):
        with pytest.raises(LedgerError, match=f"^the group of sample {name} is not leased here"):
            account.train(group)


def test_books_that_do_not_balance_are_told_where_a_source_promises_that_they_do(source):
    source.ledger.issued += 1
    with pytest.raises(LedgerError, match="the books do not balance: Ledger"):
        RolloutAccount(source).close()
    other = plugins.OwnBuffer(source.args)
    other.ledger.issued += 1
    RolloutAccount(other).close()


def told(source):
    return {name.removeprefix("rollout/ledger/"): count for name, count in ledger_metrics(source).items()}


def test_accounts_are_metrics_that_go_on_after_a_restart(source):
    assert told(source) == {} == ledger_metrics(object())
    account = RolloutAccount(source)
    groups = account.take(6)
    account.train(groups[0])
    account.filter(groups[1])
    account.drop(groups[2], "too_old")
    account.drop(groups[3], "split")
    account.give_back(groups[4:5])
    counts = {"issued": 6, "trained": 1, "filtered": 1, "dropped": 2, "buffered": 1, "leased": 1}
    assert told(source) == {**counts, "unbalanced": 0}
    assert told(restarted(source)) == {**counts, "buffered": 2, "leased": 0, "unbalanced": 0}


def test_groups_that_vanish_are_told_while_an_account_is_open(source):
    account = RolloutAccount(source)
    account.give_back(account.take(3))
    source.buffer.pop()
    assert told(source)["unbalanced"] == 1
    source.buffer.clear()
    source.ledger.issued += 4
    assert told(source)["unbalanced"] == 7
    other = plugins.OwnBuffer(source.args)  # which does not promise to keep its books
    other.add_samples(other.get_samples(2))
    assert told(other)["unbalanced"] == 0


@pytest.mark.parametrize(
    ("books", "records", "balanced"),
    [
        ({"issued": 6, "trained": 1, "filtered": 2, "buffered": 1, "leased": 2}, 2, True),
        ({"issued": 6, "trained": 1, "filtered": 2, "buffered": 1, "leased": 2}, 3, False),
        ({"issued": 3, "trained": 4, "buffered": -1}, 0, False),
        ({"issued": 3, "trained": 4}, 0, False),
        ({"issued": 0, "buffered": 0}, 0, True),
    ],
)
def test_each_group_has_one_place(books, records, balanced):
    ledger = Ledger(**books)
    ledger.records = dict.fromkeys(range(records))
    assert ledger.balanced is balanced
