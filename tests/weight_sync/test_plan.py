"""A plan knows what an update consists of before it starts, and tells when something else is sent."""

import weakref

import pytest
import torch

from slime.training.weights import TensorInfo, require_form
from slime.weight_sync.filters.filter import Filter
from slime.weight_sync.filters.pairs import WholePairs
from slime.weight_sync.plan import Manifest, WeightPlan

NAMES = ("a", "b", "c")


class Source:
    """Three tensors, a bucket each; counts what was gathered."""

    ranks, rounding = frozenset({0}), 0.0

    def __init__(self, announced=NAMES, dtype=torch.float32):
        self.gathered = []
        self._announced, self._dtype = announced, dtype

    def manifest(self):
        return [TensorInfo(name, (2,), self._dtype) for name in self._announced]

    def buckets(self, max_bytes):
        self.max_bytes = max_bytes
        for name in NAMES:
            self.gathered.append(name)
            yield [(name, torch.ones(2))]


class Halves(Filter):
    """Sends each tensor as two."""

    needs_session = True

    def manifest(self, tensors):
        return [TensorInfo(t.name + part, (1,), t.dtype) for t in tensors for part in "12"]

    def apply(self, buckets):
        for bucket in buckets:
            yield [
                (name + part, tensor[at : at + 1]) for name, tensor in bucket for at, part in enumerate("12")
            ]


def test_filters_say_what_they_make_of_the_manifest():
    plan = WeightPlan(Source(), [Halves()], 1)
    assert [*plan.manifest.tensors] == ["a1", "a2", "b1", "b2", "c1", "c2"]
    assert plan.manifest.nbytes == 24
    assert plan.needs_session and not WeightPlan(Source(), [], 1).needs_session
    assert WeightPlan(Source(), [], 1).sent is None and WeightPlan(Source(), [], 1, True).sent is not None
    sent = []
    assert plan.carry(lambda bucket, is_last: sent.append(([*dict(bucket)], is_last)) or 8) == 24
    assert sent == [(["a1", "a2"], False), (["b1", "b2"], False), (["c1", "c2"], True)]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (Source(("a", "b")), "'c': sent twice, or not in the manifest"),
        (Source((*NAMES, "d")), "'d': not sent"),
        (Source((*NAMES, "d", "e")), "'d' and 1 others: not sent"),
        (Source(dtype=torch.bfloat16), r"'a': float32 \[2\] \(wanted: bfloat16 \[2\]\)"),
    ],
)
def test_another_tensor_than_was_announced_is_named(source, said):
    with pytest.raises(RuntimeError, match=said):
        WeightPlan(source, [], 1).carry(lambda bucket, is_last: 0)


def test_a_name_that_comes_twice_is_refused_before_anything_is_sent():
    with pytest.raises(ValueError, match="'b': is in the update twice"):
        Manifest(Source((*NAMES, "b")).manifest())


def test_a_rank_that_fails_or_sends_nothing_gathers_to_the_end():
    """Others gather in step with it."""
    failed, silent = Source(), Source()

    def refuse(bucket, is_last):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        WeightPlan(failed, [Halves()], 1).carry(refuse)
    assert WeightPlan(silent, [], 1).carry(None) == 0
    assert failed.gathered == silent.gathered == [*NAMES]


class LastFirst(Filter):
    """Holds everything back up to the end."""

    def apply(self, buckets):
        held = []
        for bucket in buckets:
            held += bucket
            yield []
        yield held


def test_one_bucket_is_gathered_before_engines_are_paused_and_prepared_where_it_is_sent():
    """On all ranks one, also where it cannot be sent."""
    source, silent, torn = Source(), Source(), Source((*NAMES, "b"))
    prepared, sent = [], []
    passage = WeightPlan(source, [], 8).begin(lambda bucket: prepared.append([*dict(bucket)]), parts=2)
    other = WeightPlan(silent, [], 8).begin(None)
    with pytest.raises(ValueError, match="'b': is in the update twice"):
        WeightPlan(torn, [], 8).begin(prepared.append)
    assert prepared == [["a"]] and source.gathered == silent.gathered == torn.gathered == ["a"]
    assert (source.max_bytes, silent.max_bytes) == (4, 8)
    passage.carry(lambda bucket, is_last: sent.append(([*dict(bucket)], is_last)) or 8)
    assert sent == [(["a"], False), (["b"], False), (["c"], True)] and other.carry(None) == 0
    assert source.gathered == silent.gathered == [*NAMES]


def test_what_depends_on_later_buckets_is_not_prepared():
    source, prepared, sent = Source(), [], []
    passage = WeightPlan(source, [LastFirst()], 8).begin(prepared.append)
    assert source.gathered == ["a"] and prepared == []
    passage.carry(lambda bucket, is_last: sent.append(([*dict(bucket)], is_last)) or 8)
    assert sent == [([*NAMES], True)]


def test_buckets_are_prepared_ahead_as_long_as_that_is_wanted_and_sent_in_their_order():
    """Other ranks gather in step. Of a bucket that is needed no more only what tells of it is kept."""
    source, silent, prepared, sent = Source(), Source(), [], []

    def prepare(bucket):
        prepared.append([*dict(bucket)])
        return len(prepared) < 2

    passage, other = WeightPlan(source, [], 8).begin(prepare), WeightPlan(silent, [], 8).begin(None)
    assert passage.may_prepare and not other.may_prepare and prepared == [["a"]]
    for each in (passage, other):
        each.prepare_next()
    assert prepared == [["a"], ["b"]] and source.gathered == silent.gathered == ["a", "b"]
    assert not passage.may_prepare

    def send(bucket, is_last):
        sent.extend((name, tensor.device.type, tuple(tensor.shape), is_last) for name, tensor in bucket)
        return 8

    assert passage.carry(send) == 24 and other.carry(None) == 0
    assert sent == [("a", "meta", (2,), False), ("b", "cpu", (2,), False), ("c", "cpu", (2,), True)]
    assert source.gathered == silent.gathered == [*NAMES]


def test_all_can_be_there_ahead_and_what_is_missing_is_known_then():
    source, sent = Counted(), []
    passage = WeightPlan(source, [WholePairs()], 1).begin(lambda bucket: True)
    while passage.may_prepare:
        passage.prepare_next()
    assert source.alive == [0, 0, 0]
    passage.carry(lambda bucket, is_last: sent.append((bucket[0][0], is_last)) or 8)
    assert sent == [("a", False), ("b", False), ("c", True)]
    passage = WeightPlan(Source((*NAMES, "d")), [], 1).begin(lambda bucket: True)
    with pytest.raises(RuntimeError, match="'d': not sent"):
        for _ in NAMES:
            passage.prepare_next()


class Counted(Source):
    """Notes at each bucket how many tensors of those before are still in memory."""

    def __init__(self):
        super().__init__()
        self.alive = []

    def buckets(self, max_bytes):
        given = weakref.WeakSet()
        for name in NAMES:
            self.alive.append(len(given))
            bucket = [(name, torch.ones(2))]
            given.add(bucket[0][1])
            yield bucket
            del bucket


@pytest.mark.parametrize("notes_sent", [False, True])
def test_a_bucket_is_gone_when_the_next_one_is_gathered(notes_sent):
    source = Counted()
    plan = WeightPlan(source, [WholePairs()], 1, notes_sent)
    assert plan.carry(lambda bucket, is_last: 8) == 24
    assert source.alive == [0, 0, 0]


def test_a_form_that_a_trainer_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"form 'adapters' \(wanted: full\)"):
        require_form("adapters", "full")
