"""Attention of a rank that has a part of each sequence: from its own queries to the keys of all ranks.

Each layer gathers keys and values in one collective; backwards, their gradients are summed. torch's own
context parallel rotates them in a ring, knows CUDA's kernels only, and takes no packed rows.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from slime.training.packed_layout import PackedLayout
from slime.utils.accelerator import has_packed_attention


def attend_split(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    group: dist.ProcessGroup,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Collective. [T / cp, heads, dim] of this rank, to the same.

    Args:
        layout: of this rank's rows.
        group: the ranks that share the sequences.
        window: the number of keys that a query sees, its own among them; None for all before it.
    """
    width = key.size(-1)
    both = _Gather.apply(torch.cat([key, value], dim=-1), group)
    key, value = both[..., :width], both[..., width:]
    if has_packed_attention(query) and value.size(-1) == width:
        return _flash(query, key, value, layout, scaling, window)
    outputs = []
    for number, part in enumerate(layout.groups):
        q = query.index_select(0, part.rows).unflatten(0, (part.segments, part.length)).transpose(1, 2)
        k, v = (
            x.index_select(0, part.key_rows).unflatten(0, (part.segments, part.keys)).transpose(1, 2)
            for x in (key, value)
        )
        mask = layout.mask(number, window)
        grouped = k.size(1) != q.size(1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    assert layout.order is not None
    return torch.cat(outputs).index_select(0, layout.order)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    varlen = layout.varlen
    key, value = (x.index_select(0, varlen.key_rows) for x in (key, value))
    out = varlen_attn(
        *(query, key, value, varlen.queries, varlen.keys, varlen.max_queries, varlen.max_keys),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.size(1) != query.size(1),
    )
    assert isinstance(out, torch.Tensor)  # a tuple only if asked for the logsumexp
    return out


class _Gather(torch.autograd.Function):
    """[n, ...] of each rank to [size * n, ...], one rank's after the other; backwards a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty(group.size() * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part = gradient.new_empty(len(gradient) // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None
