"""From a rank's shard of a rollout to packed micro-batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime.training.batch import FIELDS, Axis, field_of, take
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

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        """The next micro-batch, with those of ``keys`` that the shard has."""
        indices = self._indices[self._next]
        self._next += 1
        return {key: take(self._batch[key], indices) for key in keys if key in self._batch}

    def reset(self) -> "DataIterator":
        """Starts again at the first micro-batch; returns itself."""
        self._next = 0
        return self


_PACKING = ("tokens", "total_lengths", "response_lengths", "loss_masks")


def packed_micro_batch(data: DataIterator, keys: Sequence[str], pad_multiple: int) -> dict[str, Any]:
    """The next micro-batch, its sequences packed into one row.

    Adds ``unconcat_tokens`` (the sequences), ``tokens`` ([1, T] int64), ``segment_lengths`` (of the sequences
    in the row) and ``full_loss_masks`` ([1, T]). The row is padded with token 0 to a multiple of
    ``pad_multiple``; the padding is one more sequence.
    """
    batch = data.get_next([*keys, *(key for key in _PACKING if key not in keys)])
    sequences: list[torch.Tensor] = batch["tokens"]
    batch["unconcat_tokens"] = sequences
    lengths = [len(sequence) for sequence in sequences]
    padding = -sum(lengths) % pad_multiple
    tokens, masks = list(sequences), []
    for total, mask in zip(lengths, batch["loss_masks"], strict=True):
        # The mask of the row whose logits predict the token, like the targets of the loss.
        masks += [mask.new_zeros(total - len(mask) - 1), mask, mask.new_zeros(1)]
    if padding:
        tokens.append(sequences[0].new_zeros(padding))
        masks.append(batch["loss_masks"][0].new_zeros(padding))
        lengths.append(padding)
    batch["tokens"] = torch.cat(tokens)[None]
    batch["full_loss_masks"] = torch.cat(masks)[None]
    batch["segment_lengths"] = lengths
    return batch
