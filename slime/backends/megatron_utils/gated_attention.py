"""Attention with an output gate on more tensor-parallel ranks than it has key-value heads."""

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention


class GatedSelfAttention(SelfAttention):
    """megatron-core's, with the gates of this rank's heads.

    Where ranks share a key-value head, each rank computes a part of the rows of ``linear_qkv`` and gathers
    those of the others, backwards a reduce-scatter sums the gradients. megatron-core 0.16 then takes the
    queries of this rank's heads out of those of the group, and leaves the gates of all of them.
    """

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """(query, key, value, gate) with ``output_gate``, each [length, batch, heads, width]."""
        parts = super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        groups = self.config.num_query_groups or 0
        if not output_gate or groups >= self.world_size:
            return parts
        query, key, value, gate = parts
        heads = query.size(2)
        first = self.tp_group.rank() % (self.world_size // groups) * heads
        return query, key, value, gate[:, :, first : first + heads]
