"""Micro-batches as megatron-core's models take them."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime.training.inputs import PackedInputs
from slime.training.micro_batches import DataIterator, packed_micro_batch
from slime.training.parallel import ParallelContext

__all__ = ["DataIterator", "get_batch"]


def get_batch(
    data_iterator: DataIterator,
    keys: Sequence[str],
    pad_multiple: int,
    context: ParallelContext | None = None,
) -> dict[str, Any]:
    """This rank's part of the next micro-batch (`packed_micro_batch`), with ``packed_seq_params``.

    The boundaries in there are those of the whole row, as megatron-core has it under context parallelism.
    """
    batch = packed_micro_batch(data_iterator, keys, pad_multiple, context)
    inputs: PackedInputs = batch["inputs"]
    params = _packed_seq_params(inputs.split.lengths, inputs.tokens.device)
    # Our layers read this, which knows what of the row is this rank's.
    inputs.layout.go_with(params)
    return {**batch, "packed_seq_params": params}


def _packed_seq_params(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
