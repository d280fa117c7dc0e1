"""Packs a rank's shard of a rollout into micro-batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from slime.training.batch import FIELDS, Axis, field_of, media_fields, take
from slime.training.inputs import PackedInputs, packed
from slime.training.nucleus_rows import IDS, OFFSETS
from slime.training.parallel import ParallelContext
from slime.utils.model_inputs import SequenceInputs
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
        found = {key: _length(batch[key][i]) for key in checked}
        wanted = {key: batch[lengths][i] for key, lengths in checked.items()}
        if found != wanted:
            raise ValueError(f"sample {numbers[i]}: lengths {found}, wanted {wanted}")
    _check_forms(batch, numbers)


def _length(value: Any) -> int:
    """Entries along the axis; positions have it last."""
    return value.size(-1) if isinstance(value, torch.Tensor) else len(value)


def _check_forms(batch: RolloutBatch, numbers: Sequence[Any]) -> None:
    """Entries of a ragged field are joined, so all must have one form."""
    for key in (key for key in batch if field_of(key).axis is Axis.RAGGED):
        forms = [list(value.shape[1:]) if value.dim() else None for value in batch[key]]
        for number, form in zip(numbers, forms, strict=True):
            if form is None or form != forms[0]:
                raise ValueError(
                    f"sample {number}: {key} has entries of shape {form}, wanted {forms[0]} as in the others"
                )


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


_ALWAYS = ("tokens", "positions", "total_lengths", "response_lengths", "loss_masks", IDS, OFFSETS)
"""Fields of every micro-batch: what packing needs, and log-probs of whatever pass."""


def packed_micro_batch(
    data: DataIterator, keys: Sequence[str], pad_multiple: int, context: ParallelContext | None = None
) -> dict[str, Any]:
    """The next micro-batch, its sequences packed into one row.

    Adds ``inputs`` (the `PackedInputs` of a forward pass) and, for losses, ``unconcat_tokens`` (the
    sequences), ``tokens`` ([1, T / cp] int64, this rank's part of the row), ``segment_lengths`` (of all
    segments of the row, padding included) and ``full_loss_masks`` ([1, T / cp]).

    Args:
        context: says which part of the row is this rank's; all of it if not given.
    """
    batch = data.get_next([*keys, *(key for key in (*_ALWAYS, *media_fields()) if key not in keys)])
    sequences: list[torch.Tensor] = batch["tokens"]
    inputs = PackedInputs.of(_sequences(batch), context or ParallelContext(), pad_multiple)
    # The mask of the row whose logits predict the token, like the targets of the loss.
    masks = [
        F.pad(mask, (len(sequence) - len(mask) - 1, 1))
        for sequence, mask in zip(sequences, batch["loss_masks"], strict=True)
    ]
    return {
        **batch,
        "inputs": inputs,
        "tokens": inputs.tokens,
        "unconcat_tokens": sequences,
        "segment_lengths": list(inputs.split.lengths),
        "full_loss_masks": packed(masks, inputs.split),
    }


def _sequences(batch: Mapping[str, Any]) -> list[SequenceInputs]:
    """The inputs of each sample of a micro-batch."""
    names = [name for name in media_fields() if name in batch]
    placed = batch.get("positions", [None] * len(batch["tokens"]))
    return [
        SequenceInputs(tokens, positions, {name: batch[name][i] for name in names})
        for i, (tokens, positions) in enumerate(zip(batch["tokens"], placed, strict=True))
    ]
