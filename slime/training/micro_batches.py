"""Packs a rank's shard of a rollout into micro-batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime.training.batch import FIELDS, Axis, field_of, take
from slime.training.context_parallel import RowSplit, row_multiple, segment_multiple
from slime.training.nucleus_rows import IDS, OFFSETS
from slime.training.parallel import ParallelContext
from slime.utils.types import RolloutBatch


def tensorize(shard: RolloutBatch, device: torch.device) -> RolloutBatch:
    """The shard with tensors in place of lists, and with the lengths and rewards of its own samples only.

    Raises:
        ValueError: a sample's fields do not fit its lengths.
    """
    batch = {key: _tensors(key, value, device) for key, value in shard.items()}
    batch["total_lengths"] = take(shard["total_lengths"], shard["partition"])
    batch["local_raw_reward"] = take(shard["raw_reward"], shard["partition"])
    _check_lengths(batch)
    return batch


def to_device(fields: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Fields whose entries are tensors, on the device."""
    return {key: [value.to(device) for value in values] for key, values in fields.items()}


def _tensors(key: str, values: Any, device: torch.device) -> Any:
    field = FIELDS.get(key)
    if field is None or field.dtype is None:
        return values
    if field.stacked:
        return torch.as_tensor(values, dtype=field.dtype, device=device)
    return [torch.as_tensor(value, dtype=field.dtype, device=device) for value in values]


def _check_lengths(batch: RolloutBatch) -> None:
    wanted_by = {Axis.TOKENS: "total_lengths", Axis.RESPONSE: "response_lengths"}
    checked = {key: wanted_by[field_of(key).axis] for key in batch if field_of(key).axis in wanted_by}
    numbers = batch.get("sample_indices", range(len(batch["tokens"])))
    for i, (total, response) in enumerate(
        zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    ):
        if not 0 <= response < total:
            raise ValueError(
                f"sample {numbers[i]}: {response} response tokens of {total} in all, wanted fewer"
            )
        found = {key: len(batch[key][i]) for key in checked}
        wanted = {key: batch[lengths][i] for key, lengths in checked.items()}
        if found != wanted:
            raise ValueError(f"sample {numbers[i]}: lengths {found}, wanted {wanted}")


class DataIterator:
    """Yields the micro-batches of a shard in order, over all its steps: dicts of the samples' values.

    Args:
        batch: the shard, after `tensorize`.
        micro_batch_indices: for each micro-batch the samples in it.
    """

    def __init__(self, batch: RolloutBatch, micro_batch_indices: Sequence[Sequence[int]]) -> None:
        self._batch, self._indices, self._next = batch, micro_batch_indices, 0

    @property
    def number(self) -> int:
        """The number of the next micro-batch, from 0."""
        return self._next

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        """The next micro-batch, with those of ``keys`` that the shard has."""
        indices = self._indices[self._next]
        self._next += 1
        return {key: take(self._batch[key], indices) for key in keys if key in self._batch}

    def peek(self, key: str, count: int) -> list[list[Any]]:
        """The values of a field in each of the next ``count`` micro-batches."""
        return [take(self._batch[key], indices) for indices in self._indices[self._next : self._next + count]]

    def reset(self) -> "DataIterator":
        """Starts again at the first micro-batch; returns itself."""
        self._next = 0
        return self


_ALWAYS = ("tokens", "total_lengths", "response_lengths", "loss_masks", IDS, OFFSETS)
"""Of a micro-batch: what packing needs, and log-probs of whatever pass."""


def packed_micro_batch(
    data: DataIterator, keys: Sequence[str], pad_multiple: int, context: ParallelContext | None = None
) -> dict[str, Any]:
    """The next micro-batch, its sequences packed into one row.

    Adds ``unconcat_tokens`` (the sequences), ``tokens`` ([1, T / cp] int64, this rank's part of the row),
    ``segment_lengths`` (of all segments of the row, padding included), ``full_loss_masks`` ([1, T / cp]) and
    ``padding_mask`` ([1, T / cp] bool, True for padding).
    Padding is token 0: at the end of sequences where context parallelism wants it, and one more segment that
    makes each rank's part a multiple of ``pad_multiple``.

    Args:
        context: says which part of the row is this rank's; all of it if not given.
    """
    context = context or ParallelContext()
    batch = data.get_next([*keys, *(key for key in _ALWAYS if key not in keys)])
    sequences: list[torch.Tensor] = batch["tokens"]
    batch["unconcat_tokens"] = sequences
    tokens, masks, lengths, paddings = [], [], [], []
    for sequence, mask in zip(sequences, batch["loss_masks"], strict=True):
        total, padding = len(sequence), -len(sequence) % segment_multiple(context)
        tokens += [sequence, sequence.new_zeros(padding)]
        # The mask of the row whose logits predict the token, like the targets of the loss.
        masks += [mask.new_zeros(total - len(mask) - 1), mask, mask.new_zeros(1 + padding)]
        lengths.append(total + padding)
        paddings.append(padding)
    if padding := -sum(lengths) % row_multiple(context, pad_multiple):
        tokens.append(sequences[0].new_zeros(padding))
        masks.append(batch["loss_masks"][0].new_zeros(padding))
        lengths.append(padding)
        paddings.append(padding)
    split = RowSplit.of(lengths, context)
    batch["tokens"] = split.take(torch.cat(tokens))[None]
    batch["full_loss_masks"] = split.take(torch.cat(masks))[None]
    batch["padding_mask"] = split.take(_padding_mask(lengths, paddings).to(sequences[0].device))[None]
    batch["segment_lengths"] = lengths
    return batch


def _padding_mask(lengths: Sequence[int], paddings: Sequence[int]) -> torch.Tensor:
    """[T] bool, True for the last tokens of each segment, as many as its padding has."""
    pairs = zip(lengths, paddings, strict=True)
    return torch.cat([torch.arange(length) >= length - padding for length, padding in pairs])
