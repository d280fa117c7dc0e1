"""Attention over packed sequences by torch's kernel for GPUs."""

import inspect
from typing import Any

import torch

from slime.training.packed_layout import PackedLayout


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of each sequence to itself.

    Args:
        query: [tokens, heads, dim].
        key: [tokens of all ranks that share sequences, groups, dim].
        value: like ``key``.
        window: tokens that one sees, itself among them; None for all before it.

    Returns:
        [tokens, heads, dim].
    """
    from torch.nn.attention.varlen import varlen_attn

    varlen = layout.varlen
    if layout.slots is not None:
        key, value = (x.index_select(0, varlen.key_rows) for x in (key, value))
    shared = query.size(1) // key.size(1)
    flags: dict[str, Any] = {}
    if shared > 1:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            flags["enable_gqa"] = True
        else:  # torch 2.11
            key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    out = varlen_attn(
        *(query, key, value, varlen.queries, varlen.keys, varlen.max_queries, varlen.max_keys),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **flags,
    )
    assert isinstance(out, torch.Tensor)  # a tuple only if asked for the logsumexp
    return out
