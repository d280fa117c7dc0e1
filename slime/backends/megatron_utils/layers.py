"""The layers in which megatron-core would need TransformerEngine: RMSNorm and packed attention."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.utils.accelerator import has_packed_attention

# Segments are padded to the longest of their group; a group takes those at least this fraction as long.
_GROUP_RATIO = 0.75


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, eq. 4) with the signature of a megatron-core norm.

    ``weight.sequence_parallel`` makes megatron-core sum its gradient over the tensor-parallel group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class SegmentGroup:
    """Segments of similar length, right-padded to one batch.

    ``rows``: [segments * length] int64, the packed row of every slot. Slots that pad point to row 0: causal
    attention hides them from the real queries before them, and their outputs are dropped.
    """

    rows: torch.Tensor
    segments: int
    length: int


@dataclass
class PackedLayout:
    """Where the segments of a packed batch lie, computed once per micro-batch and used by every layer.

    ``positions``: [tokens] int64, position of each token within its segment.
    ``order``: [tokens] int64, for each packed row its slot in the concatenated outputs of ``groups``;
    None if there is one group whose rows are the packed rows themselves.
    """

    groups: list[SegmentGroup]
    positions: torch.Tensor
    order: torch.Tensor | None
    _rope: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, params: PackedSeqParams) -> "PackedLayout":
        """The layout of ``params``, kept on it."""
        layout = getattr(params, "segment_layout", None)
        if layout is None:
            layout = cls.from_boundaries(params.cu_seqlens_q.tolist(), params.cu_seqlens_q.device)
            vars(params)["segment_layout"] = layout
        return layout

    @classmethod
    def from_boundaries(cls, boundaries: list[int], device: torch.device) -> "PackedLayout":
        """Layout of the segments ``boundaries[i]:boundaries[i + 1]``, empty ones left out."""
        segments = [(a, b) for a, b in pairwise(boundaries) if b > a]
        positions = torch.cat([torch.arange(b - a) for a, b in segments])
        groups, slots = [], []
        offset = 0
        for members in _similar_lengths(segments):
            length = members[0][1] - members[0][0]
            starts = torch.tensor([a for a, _ in members])
            ends = torch.tensor([b for _, b in members])
            rows = starts[:, None] + torch.arange(length)
            real = rows < ends[:, None]
            slots.append(torch.stack([rows[real], real.flatten().nonzero().flatten() + offset]))
            groups.append(SegmentGroup(rows.where(real, 0).flatten().to(device), len(members), length))
            offset += rows.numel()
        packed_rows, slot = torch.cat(slots, dim=1)
        order = torch.empty_like(slot)
        order[packed_rows] = slot
        in_place = len(groups) == 1 and torch.equal(groups[0].rows, torch.arange(offset, device=device))
        return cls(groups, positions.to(device), None if in_place else order.to(device))

    def rope(self, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the tokens' rotary angles: [tokens, 1, head_dim] each."""
        if dtype not in self._rope:
            angles = torch.outer(self.positions.float(), inv_freq.float())
            angles = torch.cat([angles, angles], dim=-1)[:, None]
            self._rope[dtype] = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._rope[dtype]


def _similar_lengths(segments: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Splits segments into groups, the longest first, that waste little when padded to their longest."""
    groups: list[list[tuple[int, int]]] = []
    # A stable sort, so that equally long segments stay in packed order.
    for start, end in sorted(segments, key=lambda segment: segment[0] - segment[1]):
        longest = groups[-1][0][1] - groups[-1][0][0] if groups else 0
        if groups and end - start >= _GROUP_RATIO * longest:
            groups[-1].append((start, end))
        else:
            groups.append([(start, end)])
    return groups


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the halves of each head (RoFormer eq. 34, NeoX layout); x: [tokens, heads, dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class PackedAttention(MegatronModule):
    """Rotary embedding and causal attention within each segment of a packed batch.

    The rotary embedding is applied here rather than by megatron-core, which recomputes the angles of every
    segment, in a Python loop, for the queries and for the keys of every layer.

    Takes megatron-core's packed ``thd`` layout, or one batch in ``sbhd``, whose columns are the segments.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        *,
        rotary_base: float,
        rope_scaling_factor: float | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError(f"--context-parallel-size {config.context_parallel_size}: wanted 1")
        if config.attention_dropout or attention_dropout:
            raise ValueError(
                f"--attention-dropout {attention_dropout or config.attention_dropout}: wanted 0.0"
            )
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        # Only for its frequencies, so that llama-3 scaling is megatron-core's.
        self.inv_freq = RotaryEmbedding(
            config.kv_channels,
            rotary_percent=1.0,
            rotary_base=rotary_base,
            rope_scaling=rope_scaling_factor is not None,
            rope_scaling_factor=rope_scaling_factor or 1.0,
            use_cpu_initialization=config.use_cpu_initialization,
        ).inv_freq

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query: [tokens, heads, dim], key and value: [tokens, groups, dim]; returns [tokens, heads * dim].

        With ``packed_seq_params=None`` the tokens are two leading dimensions [length, batch]. The mask is
        always causal; ``attention_mask`` is ignored, as megatron-core passes None with packed batches.
        """
        if packed_seq_params is not None:
            layout = PackedLayout.of(packed_seq_params)
            return self._packed(query, key, value, layout, packed_seq_params).flatten(1)
        length, batch = query.shape[:2]
        layout = PackedLayout.from_boundaries([i * length for i in range(batch + 1)], query.device)
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._packed(query, key, value, layout, None).reshape(batch, length, -1)
        return out.transpose(0, 1).contiguous()

    def _packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        params: PackedSeqParams | None,
    ) -> torch.Tensor:
        if layout.positions.numel() != query.size(0):
            raise ValueError(
                f"packed batch: {query.size(0)} tokens, cu_seqlens end at {layout.positions.numel()}"
            )
        cos, sin = layout.rope(self.inv_freq, query.dtype)
        query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        if params is not None and has_packed_attention(query):
            return self._flash(query, key, value, params)
        if layout.order is None:
            return self._group(query, key, value, layout.groups[0])
        outputs = []
        for group in layout.groups:
            q, k, v = (x.index_select(0, group.rows) for x in (query, key, value))
            outputs.append(self._group(q, k, v, group))
        return torch.cat(outputs).index_select(0, layout.order)

    def _group(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: SegmentGroup
    ) -> torch.Tensor:
        """Attention of one padded group; takes and returns [segments * length, heads, dim]."""
        shape = (group.segments, group.length)
        q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (query, key, value))
        gqa = k.size(1) != q.size(1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(0, 1)

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: PackedSeqParams
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            query,
            key,
            value,
            params.cu_seqlens_q,
            params.cu_seqlens_kv,
            params.max_seqlen_q,
            params.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=key.size(1) != query.size(1),
        )
        assert isinstance(out, torch.Tensor)  # a tuple only if asked for the logsumexp
        return out
