"""Versions in memory: an engine that takes what a trainer sends holds the trainer's bytes, or nothing."""

import numpy as np
import pytest
import torch

from slime.weight_sync.versions.live import ChangedBucket, HeldState, SentState, SentTensor, equal_bytes
from tests.weight_sync.test_delta import Source, require_equal

ALGORITHM = "xxh3-128"


class Pair:
    """A trainer and an engine, with nothing between them."""

    def __init__(self, encoding="xor"):
        self.sent, self.held, self.source = SentState(encoding, ALGORITHM), HeldState(), Source(3)
        self.got, self.forms, self.bytes = {}, [], 0

    def update(self, whole=False, damage=lambda payload: None):
        base = None if whole else self.sent.state
        self.sent.begin(whole=base is None)
        self.got, self.forms, self.bytes = {}, [], 0
        pairs = [*self.source.weights.items()]
        for number, bucket in enumerate((pairs[:2], pairs[2:])):
            tensors, payload = self.sent.bucket(bucket)
            payload = payload.copy()
            damage(payload)
            state = self.sent.leads_to() if number else None
            told = ChangedBucket(tensors, ALGORITHM, number, base, state)
            assert told.size == payload.size
            self.held.begin(told)
            for name, tensor in self.held.take(told, payload):
                self.got[name] = tensor.clone()
            payload[:] = 0  # an engine receives the next one into the same memory
            self.forms += [tensor.form for tensor in tensors]
            self.bytes += payload.size
        self.held.finish(state)
        self.sent.confirm()
        assert self.held.state == self.sent.state is not None


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_each_update_leads_to_the_trainers_bytes(encoding):
    pair = Pair(encoding)
    whole = sum(tensor.nbytes for tensor in pair.source.weights.values())
    for number in range(30):
        before = {name: tensor.clone() for name, tensor in pair.source.weights.items()}
        if number:
            pair.source.train()
        pair.update()
        require_equal(pair.got, pair.source.weights)
        if number == 0:
            assert pair.bytes == whole == pair.sent.nbytes and {*pair.forms} == {"whole"}
            continue
        changed = {
            name: int((bits(tensor) != bits(before[name])).sum())
            for name, tensor in pair.source.weights.items()
        }
        assert pair.sent.changed == sum(changed.values()) and pair.bytes < whole / 4
        assert [form == "same" for form in pair.forms] == [not count for count in changed.values()]
    pair.update(whole=True)
    assert pair.bytes == whole and pair.sent.changed == 0


def bits(tensor):
    return tensor.view(-1).view(torch.uint8)


def test_what_has_changed_everywhere_goes_as_it_is():
    pair = Pair()
    pair.update()
    pair.source.weights = Source(4).weights
    pair.update()
    require_equal(pair.got, pair.source.weights)
    assert pair.forms == ["whole", "same", "whole", "whole"]
    assert pair.bytes == pair.sent.nbytes


def test_a_byte_that_came_otherwise_is_found_and_its_tensor_named():
    for encoding in ("xor", "overwrite"):
        pair = Pair(encoding)
        pair.update()
        bits(pair.source.weights["c"])[3] ^= 8

        def damage(payload):
            if payload.size:
                payload[-1] ^= 1

        with pytest.raises(ValueError, match="weight 'c': "):
            pair.update(damage=damage)
        assert pair.held.state is None and pair.sent.state is None
        pair.update()  # a whole one, as nothing was confirmed
        require_equal(pair.got, pair.source.weights)
    pair = Pair()
    with pytest.raises(ValueError, match=r"weight 'a': xxh3-128 \w+ \(wanted: \w+, as was sent\)"):
        pair.update(damage=lambda payload: payload.__setitem__(0, payload[0] ^ 1))


def test_changes_are_refused_by_who_holds_something_else():
    pair, other = Pair(), HeldState()
    pair.update()
    tensor = SentTensor("a", "bfloat16", (64, 32), "xor", 20, "0")
    with pytest.raises(ValueError, match=r"changes of weights abc \(wanted: of None, or whole ones\)"):
        other.begin(ChangedBucket([], ALGORITHM, 0, "abc"))
    with pytest.raises(ValueError, match="a change of 4096 bytes"):
        other.begin(ChangedBucket([tensor], ALGORITHM, 0))
    with pytest.raises(ValueError, match=r"bucket 1 of changes \(wanted: 0\)"):
        HeldState().begin(ChangedBucket([], ALGORITHM, 1))
    for wrong in (
        tensor._replace(size=0),
        tensor._replace(size=4096),
        tensor._replace(form="whole"),
        tensor._replace(form="same"),
        tensor._replace(form="same", size=1),
        tensor._replace(form="code"),
        tensor._replace(shape=(64, 33)),
        tensor._replace(dtype="float31"),
        tensor._replace(size=-1),
    ):
        with pytest.raises(ValueError, match=r"weight 'a'|float31"):
            pair.held.begin(ChangedBucket([wrong], ALGORITHM, 0, pair.held.state))
        pair = Pair()
        pair.update()


def test_an_update_that_lacks_a_tensor_is_not_complete():
    pair = Pair()
    pair.update()
    state = pair.held.state
    tensors, payload = pair.sent.bucket(list(pair.source.weights.items())[:2])
    told = ChangedBucket(tensors, ALGORITHM, 0)
    pair.held.begin(told)
    pair.held.take(told, payload)
    with pytest.raises(ValueError, match="lead to weights of state"):
        pair.held.finish(state)
    assert pair.held.state is None


def test_a_whole_update_may_be_of_fewer_tensors():
    pair = Pair()
    pair.update()
    del pair.source.weights["b"]
    pair.update(whole=True)
    require_equal(pair.got, pair.source.weights)
    gone = SentTensor("b", "float32", (1,), "same", 0, "0")
    with pytest.raises(ValueError, match=r"weight 'b': a change of 4 bytes \(found: none; send it whole\)"):
        pair.held.begin(ChangedBucket([gone], ALGORITHM, 0, pair.held.state))


def test_ranks_that_received_different_bytes_are_told_of():
    same, other = torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    assert np.array_equal(equal_bytes([same, same.clone()]), same.numpy())
    with pytest.raises(ValueError, match="TP rank 1: other bytes"):
        equal_bytes([same, other])
