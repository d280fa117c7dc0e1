"""The layers for which megatron-core would need TransformerEngine: RMSNorm, packed attention, sinks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.autograd.function import once_differentiable

from slime.models.rope import Rope
from slime.training.packed_layout import PackedLayout, SegmentGroup
from slime.training.varlen_attention import varlen_attention
from slime.utils.accelerator import has_packed_attention


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, eq. 4) with the signature of a megatron-core norm.

    With ``config.layernorm_zero_centered_gamma`` the factor is 1 + weight, and all is computed in float32.
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
        self._zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self._zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._zero_centered:
            normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
            return (normed * (1.0 + self.weight.float())).type_as(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def apply_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, start: int = 0, interleaved: bool = False
) -> torch.Tensor:
    """Rotates pairs of features of each head (RoFormer eq. 34), and leaves the others alone.

    Args:
        x: [tokens, heads, dim].
        cos, sin: [tokens, 1, width] each, of the angles, which both features of a pair share.
        start: the first of the ``width`` features that are rotated.
        interleaved: whether neighbours make a pair, else features ``width / 2`` apart do (NeoX layout).
    """
    return _Rope.apply(x, cos, sin, start, interleaved)


class _Rope(torch.autograd.Function):
    """Rotates by the angles, gradients the other way, and has halves in memory beside the result, no more."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, start: int, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = start, interleaved
        return _rotated(x, cos, sin, start, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin, *ctx.pairs), None, None, None, None


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, start: int, interleaved: bool
) -> torch.Tensor:
    width = cos.size(-1)
    features = slice(start, start + width)
    if width == x.size(-1):
        result = x * cos
    else:
        result = x.clone()
        result[..., features] *= cos
    rotated, given = result[..., features], x[..., features]
    half = width // 2
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    )
    rotated[..., first] -= given[..., second] * sin[..., first]
    rotated[..., second] += given[..., first] * sin[..., second]
    return result


class PackedAttention(MegatronModule):
    """Rotary embedding and causal attention within each segment of a packed batch.

    The rotary embedding is applied here rather than by megatron-core, which recomputes the angles of every
    segment, in a Python loop, for the queries and for the keys of every layer.

    Takes megatron-core's packed ``thd`` layout, or one batch in ``sbhd``, whose columns are the segments.

    Under context parallelism a rank has the queries, keys and values of its own rows. It gathers the keys and
    values of all, in one all-gather per layer, and attends with its own queries; backwards a reduce-scatter
    sums the gradients of each rank's keys and values. With few key-value heads the gathered ones are small
    beside the activations of a layer, and there is one kernel call instead of a ring of them.
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
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        rope: Rope,
        rotated_from: int = 0,
        rotated_width: int | None = None,
        score_factor: float = 1.0,
        windows: Sequence[int | None] | None = None,
        local_rope: Rope | None = None,
        sinks: bool = False,
    ) -> None:
        """megatron-core's arguments, and what is rotated: ``rotated_width`` features of a head (None: what
        ``rope`` says) from the feature ``rotated_from`` on. ``score_factor`` multiplies the scores.

        ``windows`` has, for each layer of the model, the number of tokens that one sees, itself included, or
        None for all; the layers with a number are rotated by ``local_rope``, if there is one. With
        ``sinks`` each head has a learned score beside those of keys, which takes its share of the softmax."""
        super().__init__(config=config)
        if config.attention_dropout or attention_dropout:
            raise ValueError(
                f"--attention-dropout {attention_dropout or config.attention_dropout}: wanted 0.0"
            )
        self._cp_group = None
        if config.context_parallel_size > 1:
            self._cp_group = pg_collection.cp if pg_collection else mpu.get_context_parallel_group()
        self.scale = (config.kv_channels**-0.5 if softmax_scale is None else softmax_scale) * score_factor
        self._window = windows[layer_number - 1] if windows else None
        self._rope = rope if self._window is None or local_rope is None else local_rope
        self.softmax_offset = sink_parameter(config) if sinks else None
        self._rotated_from = rotated_from
        self._rotated_width = (
            int(config.kv_channels * rope.percent) if rotated_width is None else rotated_width
        )

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
            return self._packed(query, key, value, layout, has_packed_attention(query)).flatten(1)
        length, batch = query.shape[:2]
        layout = PackedLayout.from_boundaries([i * length for i in range(batch + 1)], query.device)
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._packed(query, key, value, layout, False).reshape(batch, length, -1)
        return out.transpose(0, 1).contiguous()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the state for megatron-core's checkpoints, which hold the sinks of all heads."""
        groups = {
            "tp_group": mpu.get_tensor_model_parallel_group(),
            "dp_cp_group": (metadata or {}).get("dp_cp_group"),
        }
        values = self.state_dict(prefix="", keep_vars=True)
        axes = {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(values, prefix, axes, sharded_offsets, **groups)

    def _packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        has_kernel: bool,
        mask_of: Callable[[int], torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """``mask_of`` gives the mask of a group; without it that of the window."""
        mask_of = mask_of or partial(layout.mask, window=self._window)
        if layout.num_rows != query.size(0):
            raise ValueError(f"packed batch: {query.size(0)} tokens, its segments have {layout.num_rows}")
        query, key = self._rotate(query, layout), self._rotate(key, layout)
        if layout.slots is not None:
            key, value = self._gather(key, value)
        if has_kernel and self.softmax_offset is None:
            return self._flash(query, key, value, layout)
        if layout.order is None:
            return self._group(query, key, value, layout.groups[0], mask_of(0))
        outputs = []
        for number, group in enumerate(layout.groups):
            q = query.index_select(0, group.rows)
            k, v = (x.index_select(0, group.key_rows) for x in (key, value))
            outputs.append(self._group(q, k, v, group, mask_of(number)))
        return torch.cat(outputs).index_select(0, layout.order)

    def _rotate(self, x: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        cos, sin = layout.rope(self._rope, self._rotated_width, x.dtype)
        return apply_rope(x, cos, sin, self._rotated_from, self._rope.interleaved)

    def _gather(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathers the tokens of all context-parallel ranks, one rank's after the other: [tokens * cp, groups,
        dim].
        """
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self._cp_group)
        return both[..., : key.size(-1)], both[..., key.size(-1) :]

    def _group(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: SegmentGroup,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one padded group; takes and returns [segments * length, heads, dim]."""
        q = query.unflatten(0, (group.segments, group.length)).transpose(1, 2)
        k, v = (x.unflatten(0, (group.segments, group.keys)).transpose(1, 2) for x in (key, value))
        if self.softmax_offset is not None:
            out = attention_with_sinks(q, k, v, self.softmax_offset, mask, self.scale)
            return out.transpose(1, 2).flatten(0, 1)
        causal = {"is_causal": True} if mask is None else {"attn_mask": mask}
        gqa = k.size(1) != q.size(1)
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=gqa, **causal)
        return out.transpose(1, 2).flatten(0, 1)

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackedLayout
    ) -> torch.Tensor:
        width = value.size(-1)
        value = F.pad(value, (0, key.size(-1) - width))  # the kernel knows one width
        out = varlen_attention(query, key, value, layout, self.scale, self._window)
        return out[..., :width]


def sink_parameter(config: TransformerConfig) -> torch.nn.Parameter:
    """One number for each head of this tensor-parallel rank."""
    heads = (config.num_attention_heads or 0) // mpu.get_tensor_model_parallel_world_size()
    parameter = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
    vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    return parameter


def attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Weighted sums of values; the weights of a query's keys and of the head's sink sum up to 1.

    Args:
        query: [segments, heads, length, dim].
        key, value: [segments, groups, keys, dim].
        sinks: [heads].
        mask: [segments, 1, length, keys] bool, True where a query sees a key; None for causal attention.
        scale: of the scores, not of the sinks.
    """
    ratio = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(ratio, 1) for x in (key, value))
    if mask is None:
        mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return weights.type_as(value) @ value
