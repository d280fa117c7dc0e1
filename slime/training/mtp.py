"""What multi-token prediction (MTP) layers read and predict: rows of a packed batch, shifted by sequence.

Row i of a sequence is given token i + k in the layer of depth k, counted from 1, and predicts token i + k + 1
(DeepSeek-V3, arXiv:2412.19437, eqs 21 to 24). Shifting is done before the row is split over context-parallel
ranks, so nothing crosses the end of a sequence or of a chunk, and no rank asks another for a token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from slime.training.inputs import PackedInputs


@dataclass(frozen=True)
class ShiftedRows:
    """This rank's part for one depth.

    Attributes:
        tokens: [1, T / cp] int64, the token that each row is given; 0 where the sequence has none.
        missing: [1, T / cp] bool, the rows that are given none, padding among them: to eq. 22 there are none.
        rows: [n] int64, those of this part whose prediction counts: of tokens that the loss mask leaves in.
        targets: [n] int64, the tokens that these predict.
    """

    tokens: torch.Tensor
    missing: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor


def shifted_rows(batch: Mapping[str, Any], depth: int) -> ShiftedRows:
    """Shifts the rows of a micro-batch of `packed_micro_batch`."""
    inputs: PackedInputs = batch["inputs"]
    take = inputs.split.take
    given, there, predicted, counts = (
        take(torch.cat(list(parts))) for parts in zip(*_shifted_segments(batch, depth), strict=True)
    )
    rows = counts.nonzero().flatten()
    return ShiftedRows(given[None], (there == 0)[None], rows, predicted[rows])


def _shifted_segments(
    batch: Mapping[str, Any], depth: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tokens given, whether there is one, tokens predicted, whether they count) of each segment, padding
    included."""
    sequences, masks = batch["unconcat_tokens"], batch["loss_masks"]
    lengths = batch["inputs"].split.lengths
    for tokens, mask, length in zip(sequences, masks, lengths, strict=False):
        whole_mask = F.pad(mask, (len(tokens) - len(mask), 0))
        yield (
            _shifted(tokens, depth, length),
            _shifted(torch.ones_like(tokens), depth, length),
            _shifted(tokens, depth + 1, length),
            _shifted(whole_mask, depth + 1, length),
        )
    for length in lengths[len(sequences) :]:  # what pads the row
        yield (sequences[0].new_zeros(length),) * 4


def _shifted(values: torch.Tensor, by: int, length: int) -> torch.Tensor:
    """``values[by:]``, zeros behind them up to ``length``."""
    rest = values[by:]
    return F.pad(rest, (0, length - len(rest)))


def predicted_tokens(loss_masks: Sequence[torch.Tensor], total_lengths: Sequence[int], depth: int) -> int:
    """How many predictions of a depth count: the masks' tokens but the first ``depth + 1`` of a sequence."""
    prompts = (length - len(mask) for mask, length in zip(loss_masks, total_lengths, strict=True))
    return sum(
        int(mask[max(0, depth + 1 - prompt) :].sum())
        for mask, prompt in zip(loss_masks, prompts, strict=True)
    )
