"""From a rank's shard of a rollout to packed micro-batches."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime.utils.types import RolloutBatch

_DTYPES = {
    "tokens": torch.long,
    "loss_masks": torch.int,
    "rollout_log_probs": torch.float32,
}
# Not per sample, or not a thing to slice.
_WHOLE_BATCH = frozenset(
    {"partition", "raw_reward", "global_batch_sizes", "num_microbatches", "micro_batch_indices"}
)


def tensorize(shard: RolloutBatch, device: torch.device) -> RolloutBatch:
    """The shard with tensors in place of lists, and with the lengths and rewards of its own samples only.

    Raises:
        ValueError: a sample's fields do not fit its lengths.
    """
    batch = dict(shard)
    for key, dtype in _DTYPES.items():
        if key in batch:
            batch[key] = [torch.as_tensor(value, dtype=dtype, device=device) for value in batch[key]]
    batch["rollout_mask_sums"] = torch.as_tensor(
        batch["rollout_mask_sums"], dtype=torch.float32, device=device
    )
    batch["total_lengths"] = [shard["total_lengths"][i] for i in shard["partition"]]
    batch["local_raw_reward"] = [shard["raw_reward"][i] for i in shard["partition"]]
    _check_lengths(batch)
    return batch


def _check_lengths(batch: RolloutBatch) -> None:
    per_response = [key for key in ("loss_masks", "rollout_log_probs") if key in batch]
    numbers = batch.get("sample_indices", range(len(batch["tokens"])))
    for i, (total, response) in enumerate(
        zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    ):
        found: dict[str, int] = {
            "tokens": len(batch["tokens"][i]),
            **{key: len(batch[key][i]) for key in per_response},
        }
        wanted: dict[str, int] = {"tokens": total, **dict.fromkeys(per_response, response)}
        sample = numbers[i]
        if not 0 <= response < total:
            raise ValueError(f"sample {sample}: {response} response tokens of {total} in all, wanted fewer")
        if found != wanted:
            raise ValueError(f"sample {sample}: lengths {found}, wanted {wanted}")


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
        micro_batch: dict[str, Any] = {}
        for key in keys:
            if key not in self._batch or key in _WHOLE_BATCH:
                continue
            values = self._batch[key]
            if isinstance(values, torch.Tensor):
                micro_batch[key] = values[list(indices)]
            else:
                micro_batch[key] = [values[i] for i in indices]
        return micro_batch

    def reset(self) -> "DataIterator":
        """Starts again at the first micro-batch; returns itself."""
        self._next = 0
        return self


def get_batch(data_iterator: DataIterator, keys: Sequence[str], pad_multiple: int) -> dict[str, Any]:
    """The next micro-batch, its sequences packed into one row.

    Adds ``unconcat_tokens`` (the sequences), ``tokens`` ([1, T] int64), ``packed_seq_params`` and
    ``full_loss_masks`` ([1, T]). The row is padded with token 0 to a multiple of ``pad_multiple``; the
    padding is one more sequence.
    """
    batch = data_iterator.get_next([*keys, "tokens", "total_lengths", "response_lengths", "loss_masks"])
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
    batch["packed_seq_params"] = _packed_seq_params(lengths, sequences[0].device)
    return batch


def _packed_seq_params(lengths: list[int], device: torch.device) -> PackedSeqParams:
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
