"""The lightning indexer of DeepSeek-V3.2 (section 2.1, eq. 1) and of GLM-5, over packed batches.

megatron-core's own neither takes packed sequences nor context parallelism, nor computes in float32.
"""

from argparse import Namespace
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig

from slime.backends.megatron_utils.latent_attention import ReplicatedLinear
from slime.backends.megatron_utils.layers import apply_rope
from slime.models.chosen_keys import chosen_keys
from slime.models.rope import Rope
from slime.training.packed_layout import PackedLayout, SegmentGroup

_EPSILON = 1e-6  # of the norm of keys
_MAX_SCORES = 2**26  # in memory at a time, of all heads


@dataclass(frozen=True)
class IndexerSizes:
    """The sizes of the indexers of a model.

    Attributes:
        heads, width: of a query; the one key of a token is as wide.
        topk: keys that a query chooses.
        kinds: 1 for each layer with an indexer, 0 for each that takes the choice of the last one before.
        rope, rotated: how the first ``rotated`` features are rotated.
    """

    heads: int
    width: int
    topk: int
    kinds: tuple[int, ...]
    rope: Rope
    rotated: int

    @classmethod
    def of(cls, args: Namespace) -> "IndexerSizes":
        return cls(
            heads=args.dsa_indexer_n_heads,
            width=args.dsa_indexer_head_dim,
            topk=args.dsa_indexer_topk,
            kinds=tuple(args.dsa_indexer_freq),
            rope=replace(args.rope, interleaved=args.dsa_indexer_interleaved),
            rotated=args.qk_pos_emb_head_dim,
        )

    def source(self, layer: int) -> int:
        """The layer, counted from 0, whose indexer chooses for this one."""
        return max(other for other in range(layer + 1) if self.kinds[other])

    def is_shared(self, layer: int) -> bool:
        """Whether the next layer takes the choice of this one's indexer."""
        return layer + 1 < len(self.kinds) and not self.kinds[layer + 1]


@dataclass(frozen=True)
class Choice:
    """The keys that queries read.

    ``chosen`` has for each group of a layout [segments, length, top-k] int32, slots of keys; None for all.
    Those behind a query are among them where it sees fewer.
    """

    chosen: list[torch.Tensor | None]

    @classmethod
    def of_all(cls, layout: PackedLayout) -> "Choice":
        """Returns the choice of all keys."""
        return cls([None] * len(layout.groups))

    @classmethod
    def of_rows(cls, rows: torch.Tensor, layout: PackedLayout) -> "Choice":
        """Returns the choice of ``rows``, [rows, top-k] int32, the reverse of `rows`."""

        def of_group(group: SegmentGroup) -> torch.Tensor | None:
            if group.keys <= rows.size(-1):
                return None
            chosen = rows.index_select(0, group.rows).unflatten(0, (group.segments, -1))
            return chosen.clamp(max=group.keys - 1)  # slots that pad have those of another segment

        return cls([of_group(group) for group in layout.groups])

    def rows(self, layout: PackedLayout) -> torch.Tensor:
        """[rows, top-k] int32: row by row, zeros where all keys are read."""
        topk = next(chosen.size(-1) for chosen in self.chosen if chosen is not None)
        parts = [
            group.rows.new_zeros(group.segments * group.length, topk, dtype=torch.int32)
            if chosen is None
            else chosen.flatten(0, 1)
            for group, chosen in zip(layout.groups, self.chosen, strict=True)
        ]
        every = torch.cat(parts)
        return every if layout.order is None else every.index_select(0, layout.order)

    @property
    def is_everything(self) -> bool:
        return all(chosen is None for chosen in self.chosen)

    def mask(self, number: int, layout: PackedLayout) -> torch.Tensor | None:
        """[segments, 1, length, keys] bool of a group, or None for those before a query."""
        group, chosen = layout.groups[number], self.chosen[number]
        if chosen is None:
            return layout.mask(number, None)
        read = torch.zeros(group.segments, group.length, group.keys, dtype=torch.bool, device=chosen.device)
        read.scatter_(-1, chosen.long(), True)
        return (read & group.seen(0, group.length))[:, None]


def left_by(layer: int) -> str:
    """The name under which the indexer of a layer leaves its choice on a `PackedLayout`."""
    return f"choice of layer {layer}"


class LightningIndexer(torch.nn.Module):
    """Scores every key for each query, and chooses those with the highest scores.

    Every tensor-parallel rank has all of it and chooses for all queries of the batch. What it chooses has no
    gradient: nothing trains it.
    """

    def __init__(
        self, config: MLATransformerConfig, sizes: IndexerSizes, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self._sizes, self._tp_group, self._cp_group = sizes, groups.tp, groups.cp
        self._sequence_parallel = config.sequence_parallel
        assert config.q_lora_rank is not None
        self.linear_wq_b = ReplicatedLinear(config, config.q_lora_rank, sizes.heads * sizes.width)
        self.linear_wk = ReplicatedLinear(config, config.hidden_size, sizes.width)
        self.k_norm = torch.nn.LayerNorm(sizes.width, eps=_EPSILON, dtype=config.params_dtype)
        self.linear_weights_proj = ReplicatedLinear(config, config.hidden_size, sizes.heads)

    @torch.no_grad()
    def forward(
        self, hidden_states: torch.Tensor, query_latent: torch.Tensor, layout: PackedLayout
    ) -> Choice:
        """Chooses the keys of each row.

        Args:
            hidden_states: [rows, 1, hidden].
            query_latent: the latent vectors of the queries, [rows, 1, rank].

        Under sequence parallelism both are this rank's part of the rows.
        """
        if layout.longest <= self._sizes.topk:
            return Choice.of_all(layout)
        sizes = self._sizes
        key = self.k_norm(self.linear_wk(hidden_states))
        parts = [self.linear_wq_b(query_latent), key, self.linear_weights_proj(hidden_states)]
        rows = torch.cat(parts, dim=-1)[:, 0]
        if self._sequence_parallel:
            rows = gather_from_sequence_parallel_region(rows, group=self._tp_group)
        query, key, weights = rows.split([sizes.heads * sizes.width, sizes.width, sizes.heads], dim=-1)
        query = self._rotate(query.unflatten(-1, (sizes.heads, sizes.width)), layout)
        key = self._rotate(key[:, None], layout)[:, 0]
        if layout.slots is not None:
            key = gather_from_sequence_parallel_region(key, group=self._cp_group)
        weights = weights.float() * sizes.heads**-0.5
        return Choice([self._choose(query, key, weights, group) for group in layout.groups])

    def _rotate(self, x: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        cos, sin = layout.rope(self._sizes.rope, self._sizes.rotated, x.dtype)
        return apply_rope(x, cos, sin, 0, self._sizes.rope.interleaved)

    def _choose(
        self, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, group: SegmentGroup
    ) -> torch.Tensor | None:
        """Chooses the keys of one group.

        query [rows, heads, width], key [all rows, width], weights [rows, heads] float32.
        """
        if group.keys <= self._sizes.topk:
            return None
        segments, length = group.segments, group.length
        q, w = (x.index_select(0, group.rows).unflatten(0, (segments, length)) for x in (query, weights))
        k = key.index_select(0, group.key_rows).unflatten(0, (segments, -1)).float().transpose(1, 2)
        step = max(1, _MAX_SCORES // (segments * self._sizes.heads * group.keys))
        chosen = []
        for begin in range(0, length, step):
            end = min(begin + step, length)
            scores = F.relu(q[:, begin:end].flatten(1, 2).float() @ k * self._sizes.width**-0.5)
            scores = scores.unflatten(1, (end - begin, self._sizes.heads))
            index = (w[:, begin:end, None] @ scores)[:, :, 0]
            index = index.masked_fill(~group.seen(begin, end), -torch.inf)
            chosen.append(chosen_keys(index, self._sizes.topk).int())
        return torch.cat(chosen, dim=1)
