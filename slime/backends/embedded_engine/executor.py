"""Runs the model for groups of sequences, over the KV cache."""

import torch
import torch.nn.functional as F

from slime.backends.embedded_engine.kv_cache import KVCache
from slime.backends.embedded_engine.model import Attend, CausalLM


class Executor:
    """Prefill and decode; which sequence sits in which cache row is the scheduler's business.

    Each call reserves what its own rows need. Where other rows are in use, the caller has reserved for
    all of them before, so that none is given up.
    """

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self._group = model.config.shape.num_attention_heads // model.config.shape.num_query_groups

    def prefill(self, prompts: list[list[int]], first_row: int) -> torch.Tensor:
        """Computes whole prompts into rows ``first_row...``; returns hidden states ``[B, T, hidden]``.

        Right-padded: with causal attention no real token sees the padding behind it.
        """
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(longest).expand(len(prompts), longest)
        rows = slice(first_row, first_row + len(prompts))
        self.cache.reserve(rows.stop, longest)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            self.cache.k[layer, rows, :, :longest] = k
            self.cache.v[layer, rows, :, :longest] = v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self._group > 1)
            return out.transpose(1, 2).flatten(2)

        return self.model.forward(ids, positions, attend)

    def prefill_chunk(self, ids: list[int], start: int, cache: KVCache) -> torch.Tensor:
        """Computes tokens ``start...`` of row 0 of a cache of its own; returns ``[1, T, hidden]``."""
        end = start + len(ids)
        cache.reserve(1, end)
        positions = torch.arange(start, end)
        visible = torch.arange(end)[None] <= positions[:, None]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache.k[layer, :1, :, start:end] = k.transpose(1, 2)
            cache.v[layer, :1, :, start:end] = v.transpose(1, 2)
            keys, values = cache.k[layer, :1, :, :end], cache.v[layer, :1, :, :end]
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=visible, enable_gqa=self._group > 1
            )
            return out.transpose(1, 2).flatten(2)

        return self.model.forward(torch.tensor(ids)[None], positions[None], attend)

    def decode(
        self, ids: torch.Tensor, positions: torch.Tensor, first_row: int, longest: int
    ) -> torch.Tensor:
        """One token for each of the rows ``first_row...``; returns hidden states ``[B, hidden]``.

        Args:
            ids: ``[B]`` newest token of each row.
            positions: ``[B]`` its position.
            first_row: cache row of the first one.
            longest: the largest position plus one.
        """
        rows = slice(first_row, first_row + len(ids))
        self.cache.reserve(rows.stop, longest)
        attend = self._decode_attention(positions, rows, longest)
        return self.model.forward(ids[:, None], positions[:, None], attend)[:, 0]

    def _decode_attention(self, positions: torch.Tensor, rows: slice, longest: int) -> Attend:
        """Attention of one query per row; grouped query heads stand in for query positions."""
        batch, group = len(positions), self._group
        index = torch.arange(batch)
        bias = torch.zeros(batch, 1, 1, longest, dtype=self.model.config.dtype)
        unseen = torch.arange(longest)[None] > positions[:, None]
        bias.masked_fill_(unseen[:, None, None], float("-inf"))
        bias = bias.expand(batch, 1, group, longest)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.k[layer, rows], self.cache.v[layer, rows]
            keys[index, :, positions] = k[:, 0]
            values[index, :, positions] = v[:, 0]
            grouped = q[:, 0].unflatten(1, (-1, group))
            out = F.scaled_dot_product_attention(
                grouped, keys[:, :, :longest], values[:, :, :longest], attn_mask=bias
            )
            return out.reshape(batch, 1, -1)

        return attend
