"""What MTP layers are given and predict, whatever the packing and the split over ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.training.context_parallel import RowSplit
from slime.training.micro_batches import DataIterator, packed_micro_batch
from slime.training.mtp import predicted_tokens, shifted_rows
from slime.training.parallel import ParallelContext

SAMPLES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 1), max_size=9)), min_size=1, max_size=5
)


def _batch(samples):
    """Each token is a number of its own, so that a token of another sample is seen."""
    tokens, masks, first = [], [], 1
    for prompt, mask in samples:
        tokens.append(torch.arange(first, first + prompt + len(mask)))
        masks.append(torch.tensor(mask, dtype=torch.int))
        first += len(tokens[-1])
    lengths = [len(each) for each in tokens]
    return {
        **{"tokens": tokens, "loss_masks": masks, "total_lengths": lengths},
        "response_lengths": [len(mask) for mask in masks],
    }


def _of_context(batch, depth, context, pad_multiple):
    data = DataIterator(batch, [[*range(len(batch["tokens"]))]])
    micro_batch = packed_micro_batch(data, (), pad_multiple, context)
    rows = RowSplit.of(micro_batch["segment_lengths"], context).rows
    return micro_batch, rows, shifted_rows(micro_batch, depth)


@given(SAMPLES, st.integers(1, 3), st.sampled_from([(1, False), (2, False), (2, True), (3, False)]))
def test_rows_are_shifted_within_their_own_samples(samples, depth, split):
    size, contiguous = split
    batch = _batch(samples)
    predicted = {
        (int(tokens[i]), int(tokens[i + depth + 1]))
        for tokens, mask in zip(batch["tokens"], batch["loss_masks"], strict=True)
        for i in range(len(tokens) - depth - 1)
        if (len(mask) - len(tokens) + i + depth + 1 >= 0) and mask[len(mask) - len(tokens) + i + depth + 1]
    }
    found = set()
    for rank in range(size):
        context = ParallelContext(cp_rank=rank, cp_size=size, contiguous_cp=contiguous)
        micro_batch, _, shifted = _of_context(batch, depth, context, pad_multiple=4)
        here = micro_batch["tokens"][0]
        assert shifted.tokens.shape == micro_batch["tokens"].shape
        ends = {int(tokens[-1]): len(tokens) for tokens in batch["tokens"]}
        rows = zip(here.tolist(), shifted.tokens[0].tolist(), shifted.missing[0].tolist(), strict=True)
        for token, given_token, missing in rows:
            last = min((end for end in ends if end >= token), default=0)
            assert given_token == (token + depth if token and token + depth <= last else 0)
            assert missing == (given_token == 0)
        found |= set(zip(here[shifted.rows].tolist(), shifted.targets.tolist(), strict=True))
    assert found == predicted
    assert predicted_tokens(batch["loss_masks"], batch["total_lengths"], depth) == len(predicted)


@pytest.mark.parametrize(("depth", "count"), [(1, 2), (2, 1), (3, 0), (9, 0)])
def test_tokens_at_the_beginning_of_a_sample_have_no_prediction(depth, count):
    mask = torch.tensor([1, 1, 1], dtype=torch.int)
    assert predicted_tokens([mask], [4], depth) == count
