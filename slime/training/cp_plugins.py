"""What plug-ins call for sequences that are split over context-parallel ranks.

Hooks and losses are given whole responses, so there is nothing to gather for them and nothing to cut: a
plug-in that gathers its values, computes over whole sequences and cuts the result for "its" rank gets whole
values in all three steps, which is what the trainer wants back. What really is a piece, because a loss of the
user's own has taken it from the logits, is gathered. Values of any other length are refused. The layout is
that of the trainer process unless another ``context`` is given.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch

from slime.training.context_parallel import AllGather, Gathering, RowSplit
from slime.training.losses import reducers
from slime.training.losses.reducers import Reducer
from slime.training.parallel import ParallelContext

Range = tuple[int, int]
Values = TypeVar("Values", torch.Tensor, Sequence[float])


def all_gather_with_cp(
    tensor: torch.Tensor, total_length: int, response_length: int, context: ParallelContext | None = None
) -> torch.Tensor:
    """The values of a whole response [R], given whole or as this rank's piece of it.

    All ranks of the group call it for the same responses in the same order. The gradient of a piece is that
    of its own values, for a loss that every rank computes alike.

    Args:
        tensor: [R], returned as it is; or one value for each of the rank's rows that predict the response,
            in the order of the sequence (`get_logits_and_tokens_offset_with_cp`).
        total_length: tokens of prompt and response.

    Raises:
        ValueError: another number of values; pieces under ``--allgather-cp``, which cuts across sequences.
    """
    context = context or ParallelContext.current()
    counts = _counts(total_length, response_length, context)
    whole, own = len(tensor) == response_length, counts[context.cp_rank]
    if not whole:
        _refuse_contiguous(context)
    if not whole and len(tensor) != own:
        raise ValueError(
            f"all_gather_with_cp: {len(tensor)} values for a response of {response_length} tokens (wanted: "
            f"all of them, or the {own} of context-parallel rank {context.cp_rank})"
        )
    if not whole and context.cp_group is None:
        raise ValueError(
            "all_gather_with_cp: a piece of a response, and no group of ranks that have the others"
        )
    # Where one rank has all, only the others can tell whole from piece: they have to be given it.
    if context.cp_group is None or (whole and response_length not in counts) or not response_length:
        return tensor
    owner = _owners(total_length, response_length, context)
    gathering = Gathering.of(owner, context.cp_size, context.cp_group)
    parts = AllGather.apply(tensor[:own], gathering.counts, gathering.group)
    return tensor if whole else parts.index_select(0, gathering.places.to(parts.device))


def slice_log_prob_with_cp(log_prob: Values, total_length: int, response_length: int) -> Values:
    """The values of a response that hooks give back: all of them, whatever the rank.

    Raises:
        ValueError: ``log_prob`` is not a whole response.
    """
    if len(log_prob) != response_length:
        raise ValueError(
            f"slice_log_prob_with_cp: {len(log_prob)} values, wanted a whole response of {response_length}"
        )
    return log_prob


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int, context: ParallelContext | None = None
) -> tuple[int, tuple[Range, Range], tuple[Range, Range], tuple[Range, Range]]:
    """What this rank has of a sequence under zigzag context parallelism, as half-open ranges of positions.

    Returns:
        The length of a chunk, ceil(L / (2 * size)); the rank's two chunks of the padded sequence; those
        positions in them whose logits predict response tokens; and the positions of these tokens, one later.
        A range without positions is (0, 0).

    Raises:
        ValueError: under ``--allgather-cp``, which cuts across sequences.
    """
    context = context or ParallelContext.current()
    _refuse_contiguous(context)
    size, rank = context.cp_size, context.cp_rank
    chunk = -(-total_length // (2 * size))
    first, second = ((i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank))
    logits = [_predicting(part, total_length, response_length) for part in (first, second)]
    tokens = [(begin + 1, end + 1) if end else (0, 0) for begin, end in logits]
    return chunk, (first, second), (logits[0], logits[1]), (tokens[0], tokens[1])


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
    context: ParallelContext | None = None,
) -> Reducer:
    """The reducer of `slime.training.losses.reducers`, which also takes this rank's pieces of all responses.

    The values of the pieces stand one after the other, as those of whole responses do; what the ranks of a
    group make of theirs adds up to what whole responses give. The trainer's own reducers take these alone.
    """
    context = context or ParallelContext.current()
    whole = reducers.get_sum_of_sample_mean(
        total_lengths, response_lengths, loss_masks, sample_denoms, calculate_per_token_loss
    )
    if context.cp_size == 1 or context.contiguous_cp:
        return whole
    owners = [_owners(*lengths, context) for lengths in zip(total_lengths, response_lengths, strict=True)]
    own = (torch.cat(owners) == context.cp_rank).nonzero()[:, 0]

    def reduce(values: torch.Tensor) -> torch.Tensor:
        if values.shape == own.shape and len(own) != sum(response_lengths):
            zeros = values.new_zeros(sum(response_lengths))
            values = zeros.index_copy(0, own.to(values.device), values)
        return whole(values)

    return reduce


def own_tokens(total_length: int, response_length: int, context: ParallelContext) -> torch.Tensor:
    """Which of a response's tokens this rank has the rows of, under zigzag context parallelism: [n] int64.

    Raises:
        ValueError: under ``--allgather-cp``, which cuts across sequences.
    """
    _refuse_contiguous(context)
    return (_owners(total_length, response_length, context) == context.cp_rank).nonzero()[:, 0]


def _predicting(chunk: Range, total: int, response: int) -> Range:
    begin, end = max(chunk[0], total - response - 1), min(chunk[1], total - 1)
    return (begin, end) if begin < end else (0, 0)


def _refuse_contiguous(context: ParallelContext) -> None:
    if context.contiguous_cp and context.cp_size > 1:
        raise ValueError("--allgather-cp: what a rank has of a sequence depends on those packed with it")


def _counts(total: int, response: int, context: ParallelContext) -> list[int]:
    """Values that each rank has of a response; of contiguous stretches none that is known."""
    if context.contiguous_cp or context.cp_size == 1:
        return [response if context.cp_size == 1 else -1] * context.cp_size
    return torch.bincount(_owners(total, response, context), minlength=context.cp_size).tolist()


def _owners(total: int, response: int, context: ParallelContext) -> torch.Tensor:
    """The rank that has the row which predicts each response token: [R] int64."""
    chunk = -(-total // (2 * context.cp_size))
    split = RowSplit((2 * context.cp_size * chunk,), context.cp_size)
    return split.slots[total - response - 1 : total - 1] // (2 * chunk)
