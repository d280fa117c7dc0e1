"""Attention of ``transformers`` models over a cache with a row for each sequence.

Models that are loaded with this implementation of attention are called with ``rows``, which says whose tokens
a forward pass has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from slime.backends.embedded_engine.kv_cache import LayerCache
from slime.backends.embedded_engine.spans import Span, of_length, spans_of

ATTENTION = "slime_rows"


class Scores(NamedTuple):
    """How a layer weighs: the scale, tokens that are seen (None for all), sinks ``[heads]`` or None."""

    scale: float
    window: int | None
    sinks: torch.Tensor | None


class Rows(Protocol):
    """Whose tokens a forward pass has."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """``[B, heads, T, width]`` for new queries, keys and values of that form; caches the latter two."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: Rows,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What ``transformers`` calls; returns ``[B, T, heads, width]``."""
    if attention_mask is not None or kwargs.get("softcap") is not None:
        raise ValueError(f"{type(module).__name__}: attends by a mask of its own, or with a soft cap")
    out = rows.attend(module.layer_idx, query, key, value, Scores(scaling, sliding_window, s_aux))
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


@dataclass
class Prompts:
    """The first tokens of sequences, right-padded; each attends by itself."""

    cache: LayerCache
    first_row: int
    lengths: Sequence[int]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        longest = max(self.lengths)
        rows = slice(self.first_row, self.first_row + len(self.lengths))
        for cached, new in zip(self.cache.layer(layer, k, v), (k, v), strict=True):
            cached[rows, :, :longest] = new[:, :, :longest]
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for row, length in enumerate(self.lengths):
            own = (slice(row, row + 1), slice(None), slice(length))
            out[own] = _weighed(q[own], k[own], v[own], _causal(0, length, scores.window, q), scores)
        return out


@dataclass
class Chunk:
    """Tokens ``start...`` of row 0, earlier ones being cached."""

    cache: LayerCache
    start: int

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        end = self.start + q.shape[2]
        keys, values = self.cache.layer(layer, k, v)
        keys[:1, :, self.start : end], values[:1, :, self.start : end] = k, v
        bias = _causal(self.start, end, scores.window, q)
        return _weighed(q, keys[:1, :, :end], values[:1, :, :end], bias, scores)


class Newest:
    """One token of each of the rows ``first_row...``; what the batch has beyond ``positions`` is padding."""

    def __init__(self, cache: LayerCache, first_row: int, positions: torch.Tensor) -> None:
        self._cache, self._positions = cache, positions
        self._rows = slice(first_row, first_row + len(positions))
        self._index = torch.arange(len(positions), device=positions.device)
        self._spans = spans_of(positions.tolist())
        self._biases: dict[int | None, list[torch.Tensor]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        keys, values = (cached[self._rows] for cached in self._cache.layer(layer, k, v))
        count = len(self._positions)
        keys[self._index, :, self._positions] = k[:count, :, 0]
        values[self._index, :, self._positions] = v[:count, :, 0]
        # Query heads that share keys stand in for query positions.
        grouped = q[:, :, 0].unflatten(1, (k.shape[1], -1))
        biases = self._biases_for(scores.window, q.dtype)
        out = q.new_zeros(*q.shape[:3], values.shape[3])
        for (start, end, length), bias in zip(self._spans, biases, strict=True):
            k, v = (of_length(cached[start:end], length) for cached in (keys, values))
            found = _weighed(grouped[start:end], k, v, bias, scores)
            out[start:end] = found.flatten(1, 2)[:, :, None]
        return out

    def _biases_for(self, window: int | None, dtype: torch.dtype) -> list[torch.Tensor]:
        if window not in self._biases:
            self._biases[window] = [self._bias(span, window, dtype) for span in self._spans]
        return self._biases[window]

    def _bias(self, span: Span, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """``[B, 1, 1, length]``: -inf at what a row's newest token does not see."""
        positions = self._positions[span.start : span.end, None]
        return _bias_at(positions, span.length, window, dtype)[:, None, None]


def _causal(start: int, end: int, window: int | None, q: torch.Tensor) -> torch.Tensor | None:
    """``[end - start, end]`` for tokens ``start:end`` of a sequence; None if they just see what is before.

    ``q`` is any tensor of the dtype and the device that it is to have.
    """
    if start == 0 and (window is None or window >= end):
        return None
    positions = torch.arange(start, end, device=q.device)[:, None]
    return _bias_at(positions, end, window, q.dtype)


def _bias_at(positions: torch.Tensor, length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """``[N, length]`` for positions ``[N, 1]``."""
    index = torch.arange(length, device=positions.device)[None]
    unseen = index > positions
    if window is not None:
        unseen |= index <= positions - window
    bias = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
    return bias.masked_fill_(unseen, float("-inf"))


def _weighed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Scaled dot-product attention; without a bias each query sees what is before it."""
    if scores.sinks is not None:
        return _with_sinks(q, k, v, bias, scores)
    if bias is not None and bias.dim() == 4:
        bias = bias.expand(-1, -1, q.shape[2], -1)  # else another kernel
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=bias,
        is_causal=bias is None,
        scale=scores.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Each head's sink takes its share of the softmax and gives nothing."""
    assert scores.sinks is not None
    if bias is None:
        positions = torch.arange(q.shape[2], device=q.device)[:, None]
        bias = _bias_at(positions, k.shape[2], None, q.dtype)
    group = len(scores.sinks) // k.shape[1]
    if q.shape[1] == k.shape[1] and group > 1:  # one token of a row, its heads in groups
        sinks = scores.sinks.view(1, k.shape[1], group, 1)
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        sinks = scores.sinks.view(1, -1, 1, 1)
    logits = q @ k.transpose(2, 3) * scores.scale + bias
    logits = torch.cat([logits, sinks.expand(*logits.shape[:3], 1).to(logits.dtype)], -1)
    return logits.float().softmax(-1)[..., :-1].to(v.dtype) @ v
