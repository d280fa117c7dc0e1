"""Attention within the sequences of a packed row, as a function that ``transformers`` models call."""

from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface

from slime.backends.fsdp_utils.segments import Segments
from slime.backends.fsdp_utils.split_attention import attend_split
from slime.training.packed_layout import PackedLayout
from slime.utils.accelerator import has_packed_attention

_numbers = count()
# What models hand to their attention without wanting anything else of it.
_IDLE = {"position_ids", "cache_position", "use_cache", "is_causal", "logits_to_keep"}


class UnknownAttention(RuntimeError):
    """A model asks of its attention what packed attention does not compute."""


class PackedAttention:
    """Causal attention, with a window where a layer has one, between the tokens of the same sequence.

    An object and no plain function: layers that are computed again in the backward pass, in a thread of
    autograd's, need the same segments as in the forward pass.

    Attributes:
        segments: of the row that the model computes at present.
        split: this rank's part of the row in the place of ``segments``, under context parallelism.
        name: under which ``transformers`` finds it, for this model alone.
    """

    def __init__(self, cp_group: dist.ProcessGroup | None = None) -> None:
        self._cp_group = cp_group
        self.segments: Segments | None = None
        self.split: PackedLayout | None = None
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
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.split is not None:
            assert self._cp_group is not None
            whose = self.split, self._cp_group
            return attend_split(query, key, value, *whose, scaling, sliding_window)[None], None
        assert self.segments is not None
        if has_packed_attention(query) and query.shape[-1] == value.shape[-1]:
            return self._flash(query, key, value, scaling, sliding_window)[None], None
        outputs = []
        for group in self.segments.groups:
            q, k, v = (group.gather(x) for x in (query, key, value))
            outputs.append(_attend(q, k, v, scaling, sliding_window))
        return self.segments.packed(outputs)[None], None

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        segments = self.segments
        assert segments is not None
        ends, longest = segments.boundaries, segments.longest
        out = varlen_attn(
            *(query, key, value, ends, ends, longest, longest),
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=key.size(1) != query.size(1),
        )
        assert isinstance(out, torch.Tensor)  # a tuple only if asked for the logsumexp
        return out


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
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[count, length, heads, dim] of one group; queries see themselves and what is before them."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mask, length = None, query.size(2)
    if window is not None and window < length:
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = ones.tril() & ones.triu(1 - window)
    grouped = key.size(1) != query.size(1)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2)
