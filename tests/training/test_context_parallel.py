"""How packed rows are split over context-parallel ranks, and what plug-ins are told of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils import cp_utils
from slime.training import parallel
from slime.training.context_parallel import RowSplit, response_rows
from slime.training.micro_batches import DataIterator, packed_micro_batch
from slime.training.parallel import ParallelContext

CPU = torch.device("cpu")


def _ranks(size, contiguous=False):
    """The contexts of a group; nothing is sent, so any object will do for the group."""
    return [
        ParallelContext(cp_group=object(), cp_rank=r, cp_size=size, contiguous_cp=contiguous)
        for r in range(size)
    ]


def _batch(lengths, context, pad_multiple=4):
    """A micro-batch of sequences whose tokens are their own rows in the whole, unpadded batch."""
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    tokens = [
        torch.arange(start, start + length) for start, length in zip(starts.tolist(), lengths, strict=True)
    ]
    responses = [length // 2 for length in lengths]
    masks = [torch.ones(response, dtype=torch.int) for response in responses]
    shard = {"tokens": tokens, "total_lengths": lengths, "response_lengths": responses, "loss_masks": masks}
    return packed_micro_batch(DataIterator(shard, [[*range(len(lengths))]]), (), pad_multiple, context)


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk():
    split = [RowSplit((8, 4), size=2, rank=rank) for rank in (0, 1)]
    assert split[0].rows.tolist() == [0, 1, 6, 7, 8, 11]
    assert split[1].rows.tolist() == [2, 3, 4, 5, 9, 10]
    with pytest.raises(ValueError, match="a segment of 6 rows: wanted a multiple of 4"):
        RowSplit((6,), size=2).take(torch.arange(6))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_gives_all_ranks_equal_work(size):
    """Keys that the rows of a rank attend to.

    Which rank has which pair of chunks, and in which order, changes no result: all that reads a part asks
    `RowSplit` where it lies. So the order is held here.
    """
    lengths = (4 * size, 2 * size)
    splits = [RowSplit(lengths, size=size, rank=rank) for rank in range(size)]
    work = [
        sum(row - piece.segment + 1 for piece in split.pieces for row in range(piece.begin, piece.end))
        for split in splits
    ]
    assert len({*work}) == 1
    assert [split.rows[0].item() for split in splits] == [2 * rank for rank in range(size)]


def test_contiguous_stretches_cut_across_segments():
    assert RowSplit((8, 4), 2, 1, contiguous=True).pieces == [(0, 6, 8), (8, 8, 12)]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 4), st.booleans(), st.integers(1, 8)
)
def test_the_parts_of_all_ranks_are_the_row(lengths, size, contiguous, pad_multiple):
    contexts = _ranks(size, contiguous)
    batches = [_batch(lengths, context, pad_multiple) for context in contexts]
    segments = batches[0]["segment_lengths"]
    splits = [RowSplit.of(segments, context) for context in contexts]
    parts = torch.cat([batch["tokens"][0] for batch in batches])
    assert all(batch["tokens"].size(1) * size == sum(segments) for batch in batches)
    assert batches[0]["tokens"].size(1) % pad_multiple == 0
    row = parts[splits[0].slots]
    assert torch.equal(torch.cat([row[split.rows] for split in splits]), parts)
    real = torch.cat(
        [
            row[start : start + length]
            for start, length in zip(torch.tensor([0, *segments]).cumsum(0).tolist(), lengths, strict=False)
        ]
    )
    assert torch.equal(real, torch.arange(sum(lengths)))
    masked = sum(int(batch["full_loss_masks"].sum()) for batch in batches)
    assert masked == sum(length // 2 for length in lengths)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(2, 4), st.booleans())
def test_responses_come_back_whole_from_the_rows_of_all_ranks(lengths, size, contiguous):
    found = []
    for context in _ranks(size, contiguous):
        batch = _batch(lengths, context)
        rows = response_rows(batch, context, CPU)
        # The row of a token holds the token before it.
        assert torch.equal(batch["tokens"][0][rows.local] + 1, rows.targets)
        found.append(rows)
    gathering, longest = found[0]._gathering, max(found[0]._gathering.counts)
    assert gathering.counts == [len(rows.targets) for rows in found]
    parts = torch.cat(
        [torch.nn.functional.pad(rows.targets, (0, longest - len(rows.targets))) for rows in found]
    )
    whole = torch.cat([tokens[len(tokens) - len(tokens) // 2 :] for tokens in batch["unconcat_tokens"]])
    assert torch.equal(parts[gathering.places], whole)


@pytest.fixture
def current(monkeypatch):
    """``current(context)``: this process is that rank."""
    return lambda context: monkeypatch.setitem(parallel._of_process, "context", context)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 4))
def test_offsets_are_those_of_the_rows_that_predict_responses(total, response, size):
    response = min(response, total - 1)
    chunk_length = -(-total // (2 * size))
    predicted = []
    for context in _ranks(size):
        parallel.set_current(context)
        chunk, chunks, logits, tokens = cp_utils.get_logits_and_tokens_offset_with_cp(total, response)
        assert chunk == chunk_length
        positions = [p for part in chunks for p in range(*part)]
        assert positions == RowSplit.of([2 * size * chunk], context).rows.tolist() or size == 1
        own = [p for part in logits for p in range(*part)]
        assert own == [p for p in positions if total - response - 1 <= p < total - 1]
        assert [p for part in tokens for p in range(*part)] == [p + 1 for p in own]
        predicted += own
    parallel._of_process.clear()
    assert sorted(predicted) == [*range(total - response - 1, total - 1)]


def test_whole_responses_are_neither_gathered_nor_cut(current):
    values = torch.randn(7)
    for context in [ParallelContext(), *_ranks(2), *_ranks(2, contiguous=True)]:
        current(context)
        assert cp_utils.all_gather_with_cp(values, 12, 7) is values
        assert cp_utils.slice_log_prob_with_cp(values, 12, 7) is values
        assert cp_utils.slice_log_prob_with_cp([0.5] * 7, 12, 7) == [0.5] * 7


def test_another_number_of_values_is_refused(current):
    current(_ranks(2)[1])
    with pytest.raises(ValueError, match="6 values for a response of 7 tokens") as error:
        cp_utils.all_gather_with_cp(torch.randn(6), 12, 7)
    assert str(error.value).endswith("(wanted: all of them, or the 5 of context-parallel rank 1)")
    with pytest.raises(ValueError, match="5 values, wanted a whole response of 7"):
        cp_utils.slice_log_prob_with_cp(torch.randn(5), 12, 7)
    current(_ranks(2, contiguous=True)[1])
    with pytest.raises(ValueError, match="--allgather-cp"):
        cp_utils.all_gather_with_cp(torch.randn(5), 12, 7)
    with pytest.raises(ValueError, match="--allgather-cp"):
        cp_utils.get_logits_and_tokens_offset_with_cp(12, 7)


def test_a_reducer_refuses_values_of_a_part_of_the_tokens():
    reduce = cp_utils.get_sum_of_sample_mean([12], [7], [torch.ones(7)])
    for values in (torch.ones(6), torch.ones(1), torch.ones(7, 1)):
        with pytest.raises(ValueError, match=r"wanted \[7\]"):
            reduce(values)


class Ranks:
    """The part of megatron-core's ``mpu`` that plug-ins' tests replace."""

    def __init__(self, size, rank):
        self.get_context_parallel_world_size, self.get_context_parallel_rank = lambda: size, lambda: rank


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("denominators", [None, [4, 9, 0.5]])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_reducer_of_pieces_makes_parts_of_the_whole(monkeypatch, size, denominators, per_token):
    totals, responses = [12, 30, 5], [7, 20, 1]
    masks = [torch.randint(0, 2, (n,)) for n in responses]
    arguments = totals, responses, masks, denominators, per_token
    values = torch.randn(sum(responses), requires_grad=True)
    whole = cp_utils.get_sum_of_sample_mean(*arguments)(values)
    (wanted,) = torch.autograd.grad(whole, values)
    parts = []
    for rank in range(size):
        monkeypatch.setattr(cp_utils, "mpu", Ranks(size, rank))
        pieces = []
        for total, response, start in zip(totals, responses, (0, 7, 27), strict=True):
            first, last = cp_utils.get_logits_and_tokens_offset_with_cp(total, response)[3]
            at = start - (total - response)
            pieces += [values[at + begin : at + end] for begin, end in (first, last) if end]
        reduce = cp_utils.get_sum_of_sample_mean(*arguments)
        assert reduce(values.detach()) == whole.detach()
        parts.append(reduce(torch.cat(pieces)))
        with pytest.raises(ValueError, match=r"wanted \[28\]"):
            reduce(torch.cat(pieces)[1:])
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(torch.autograd.grad(sum(parts), values)[0], wanted)


def test_without_a_trainer_and_megatron_core_there_is_one_rank(monkeypatch):
    monkeypatch.delitem(cp_utils.sys.modules, "megatron.core", raising=False)
    assert cp_utils.get_logits_and_tokens_offset_with_cp(12, 7)[0] == 6
    stub = type(cp_utils)("megatron.core")
    stub.mpu = Ranks(2, 1)
    monkeypatch.setitem(cp_utils.sys.modules, "megatron.core", stub)
    assert cp_utils.mpu is stub.mpu
    assert cp_utils.get_logits_and_tokens_offset_with_cp(12, 7)[0] == 3
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        cp_utils.other  # noqa: B018


def test_the_layout_of_the_trainer_is_the_one_that_counts(monkeypatch, current):
    monkeypatch.setattr(cp_utils, "mpu", Ranks(4, 1))
    current(_ranks(2)[1])
    assert cp_utils.get_logits_and_tokens_offset_with_cp(12, 7)[0] == 3
