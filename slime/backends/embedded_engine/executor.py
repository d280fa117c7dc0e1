"""Runs the model for groups of sequences, over the KV cache.

Batched as far as no bit of a sequence's result depends on who else is in the batch: projections take all
rows at once; attention takes together only what has the same shape whoever is there.
"""

import torch
import torch.nn.functional as F

from slime.backends.embedded_engine.kv_cache import KVCache
from slime.backends.embedded_engine.model import Attend, CausalLM
from slime.backends.embedded_engine.spans import of_length, spans_of


def padded_ids(prompts: list[list[int]], length: int) -> torch.Tensor:
    """``[B, length]`` int64 on the host, zeros behind each prompt."""
    ids = torch.zeros(len(prompts), length, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    return ids


class Executor:
    """Prefill and decode; which sequence sits in which cache row is the scheduler's business.

    Each call reserves what its own rows need. Where other rows are in use, the caller has reserved for
    all of them before, so that none is given up.
    """

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.device = model.config.device
        self.routes: torch.Tensor | None = None
        self._group = model.config.shape.num_attention_heads // model.config.shape.num_query_groups

    def new_cache(self, length: int) -> KVCache:
        """Makes a cache for a prompt of that length that is computed alone, in chunks."""
        return KVCache(self.model.config, 1, length)

    def prefill(self, prompts: list[list[int]], first_row: int) -> torch.Tensor:
        longest = max(map(len, prompts))
        ids = padded_ids(prompts, longest).to(self.device)
        positions = torch.arange(longest, device=self.device).expand(len(prompts), longest)
        rows = slice(first_row, first_row + len(prompts))
        self.cache.reserve(rows.stop, longest)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            self.cache.k[layer, rows, :, :longest] = k
            self.cache.v[layer, rows, :, :longest] = v
            out = torch.zeros_like(q)
            for row, prompt in enumerate(prompts):
                own = (slice(row, row + 1), slice(None), slice(len(prompt)))
                out[own] = F.scaled_dot_product_attention(
                    q[own], k[own], v[own], is_causal=True, enable_gqa=self._group > 1
                )
            return out.transpose(1, 2).flatten(2)

        return self._forward(ids, positions, attend)

    def prefill_chunk(self, ids: list[int], start: int, cache: KVCache) -> torch.Tensor:
        """Computes tokens ``start...`` of row 0 of a cache of its own; returns ``[1, T, hidden]``."""
        end = start + len(ids)
        cache.reserve(1, end)
        positions = torch.arange(start, end, device=self.device)
        visible = torch.arange(end, device=self.device)[None] <= positions[:, None]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache.k[layer, :1, :, start:end] = k.transpose(1, 2)
            cache.v[layer, :1, :, start:end] = v.transpose(1, 2)
            keys, values = cache.k[layer, :1, :, :end], cache.v[layer, :1, :, :end]
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=visible, enable_gqa=self._group > 1
            )
            return out.transpose(1, 2).flatten(2)

        return self._forward(torch.tensor([ids], device=self.device), positions[None], attend)

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, first_row: int, longest: int
    ) -> torch.Tensor:
        last_row = first_row + len(ids)
        self.cache.reserve(last_row, longest)
        attend = self._decode_attention(positions, slice(first_row, last_row))
        hidden = self._forward(ids[:, None], positions[:, None], attend)[:, 0]
        if self.routes is not None:
            self.routes = self.routes[:, 0]
        return hidden

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        hidden = self.model.forward(ids, positions, attend)
        if self.model.recorder is not None:
            self.routes = self.model.recorder.take().unflatten(0, ids.shape)
        return hidden

    def _decode_attention(self, positions: torch.Tensor, rows: slice) -> Attend:
        """Attention of one query per row; grouped query heads stand in for query positions."""
        group = self._group
        index = torch.arange(len(positions), device=self.device)
        spans = spans_of(positions.tolist())
        biases = [self._bias(positions[start:end], length) for start, end, length in spans]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.k[layer, rows], self.cache.v[layer, rows]
            keys[index, :, positions] = k[:, 0]
            values[index, :, positions] = v[:, 0]
            grouped = q[:, 0].unflatten(1, (-1, group))
            out = [
                F.scaled_dot_product_attention(
                    grouped[start:end],
                    of_length(keys[start:end], length),
                    of_length(values[start:end], length),
                    attn_mask=bias,
                )
                for (start, end, length), bias in zip(spans, biases, strict=True)
            ]
            return torch.cat(out).reshape(len(positions), 1, -1)

        return attend

    def _bias(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """``[B, 1, group, length]``: -inf behind each row's position."""
        size = (len(positions), 1, 1, length)
        bias = torch.zeros(size, dtype=self.model.config.dtype, device=self.device)
        unseen = torch.arange(length, device=self.device)[None] > positions[:, None]
        bias.masked_fill_(unseen[:, None, None], float("-inf"))
        return bias.expand(len(positions), 1, self._group, length)
