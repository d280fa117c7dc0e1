"""Attention within the sequences of a packed row, as a function that ``transformers`` models call.

A rank that has a part of each sequence attends from its own queries to the keys of all ranks. Each layer
gathers keys and values in one collective; backwards, their gradients are summed.
"""

from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from slime.training.packed_layout import PackedLayout
from slime.training.varlen_attention import varlen_attention
from slime.utils.accelerator import has_packed_attention

_numbers = count()
# What models hand to their attention without wanting anything else of it.
_IDLE = {"position_ids", "cache_position", "use_cache", "is_causal", "logits_to_keep"}


class UnknownAttention(RuntimeError):
    """A model asks of its attention what packed attention does not compute."""


class PackedAttention:
    """Causal attention, with a window where a layer has one, between the tokens of the same sequence.

    An object and no plain function: layers that are computed again in the backward pass, in a thread of
    autograd's, need the same layout as in the forward pass.

    Attributes:
        layout: of this rank's part of the row that the model computes at present.
        name: under which ``transformers`` finds it, for this model alone.
    """

    def __init__(self, cp_group: dist.ProcessGroup | None = None) -> None:
        self._cp_group = cp_group
        self.layout: PackedLayout | None = None
        self.name = f"slime_packed_{next(_numbers)}"
        AttentionInterface.register(self.name, self)  # type: ignore[arg-type]

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **features: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, heads, T / cp, dim], key, value [1, key heads, T / cp, dim] -> [1, T / cp, heads, dim].

        Raises:
            UnknownAttention: the model wants more than causal attention.
        """
        if wanted := _wanted(module, attention_mask, dropout, features):
            raise UnknownAttention(f"{type(module).__name__} wants {', '.join(wanted)}")
        assert self.layout is not None
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if self._cp_group is not None:
            key, value = _of_all_ranks(key, value, self._cp_group)
        return _attend(query, key, value, self.layout, scaling, sliding_window)[None], None


def _wanted(
    module: torch.nn.Module, mask: torch.Tensor | None, dropout: float, features: dict[str, Any]
) -> list[str]:
    """What a model asks of its attention beside causal attention with a window: any mask of its own, too."""
    given = {name: value for name, value in features.items() if value is not None and value is not False}
    found = sorted(given.keys() - _IDLE)
    causal = features.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    others = {"dropout": dropout, "a mask of its own": mask is not None, "no causal mask": not causal}
    return [*found, *(name for name, there in others.items() if there)]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[T / cp, heads, dim] of queries, keys and values of all ranks; queries see themselves and those before.

    Args:
        window: the number of keys that a query sees, its own among them; None for all before it.
    """
    if has_packed_attention(query) and query.shape[-1] == value.shape[-1]:
        return varlen_attention(query, key, value, layout, scaling, window)
    outputs = []
    for number, group in enumerate(layout.groups):
        q = group.gather(query).transpose(1, 2)
        k, v = (group.gather_keys(x).transpose(1, 2) for x in (key, value))
        mask = layout.mask(number, window)
        grouped = k.size(1) != q.size(1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = torch.cat(outputs)
    return joined if layout.order is None else joined.index_select(0, layout.order)


def _of_all_ranks(
    key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the ranks that share sequences, gathered in one collective.

    torch's own context parallel rotates them in a ring, knows CUDA's kernels only, and takes no packed rows.
    """
    width = key.size(-1)
    both = _Gather.apply(torch.cat([key, value], dim=-1), group)
    return both[..., :width], both[..., width:]


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
