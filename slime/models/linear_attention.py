"""What families have in common whose layers are gated delta nets (Yang et al. 2024), but for some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from slime.config.model import LinearShape, ModelConfig
from slime.models.decoder import DECODER_WEIGHTS
from slime.models.flops import Products
from slime.models.hf_config import HfConfig
from slime.models.rules import GatedQkvRule, LayerKind, Rule, joined
from slime.models.shape import ModelShape, Sizes

if TYPE_CHECKING:
    import torch

_LINEAR, _FULL = "linear_attention", "full_attention"
_INTERVAL = 4  # every fourth layer has attention, where config.json does not say so


def linear_shape(config: HfConfig, num_layers: int) -> LinearShape:
    """What config.json says of the delta nets and which layers have one.

    Raises:
        HfConfigError: a size that is none, heads that do not go together, or no layer with attention.
    """
    keys, values = config.size("linear_num_key_heads", 16), config.size("linear_num_value_heads", 32)
    if values % keys:
        raise config.wrong("linear_num_value_heads", values, f"a multiple of linear_num_key_heads {keys}")
    return LinearShape(
        linear_attention_freq=_kinds(config, num_layers),
        linear_conv_kernel_dim=config.size("linear_conv_kernel_dim", 4),
        linear_key_head_dim=config.size("linear_key_head_dim", 128),
        linear_value_head_dim=config.size("linear_value_head_dim", 128),
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
    )


def _kinds(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    interval = config.size("full_attention_interval", _INTERVAL)
    default = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers)]
    kinds = config.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != num_layers or {*kinds} - {_LINEAR, _FULL}:
        raise config.wrong("layer_types", kinds, f"{_LINEAR} or {_FULL} for each of {num_layers} layers")
    return tuple(int(kind == _LINEAR) for kind in kinds)


class DeltaNetSizes(NamedTuple):
    """The sizes of a gated delta net, of all heads together unless it says otherwise.

    ``ratio`` counts the value heads of a key head. ``mixed`` is the width of query, key and value.
    """

    key_heads: int
    ratio: int
    key: int
    value: int
    kernel: int

    @classmethod
    def of(cls, shape: ModelConfig | LinearShape) -> DeltaNetSizes:
        """Returns the sizes of a model that has such layers."""
        keys, values = shape.linear_num_key_heads or 0, shape.linear_num_value_heads or 0
        kernel = shape.linear_conv_kernel_dim or 0
        key, value = shape.linear_key_head_dim or 0, shape.linear_value_head_dim or 0
        return cls(keys, values // keys, key, value, kernel)

    @property
    def of_head(self) -> tuple[int, ...]:
        """Rows of a key head: query, key, and of its value heads value, gate, write strength and decay."""
        values = self.ratio * self.value
        return self.key, self.key, values, values, self.ratio, self.ratio

    @property
    def mixed(self) -> int:
        return self.key_heads * sum(self.of_head[:3])

    @property
    def projected(self) -> int:
        return self.key_heads * sum(self.of_head)


@dataclass(frozen=True)
class ByKeyHead(Rule):
    """Rows that belong to key heads; those of a head lie together here, so that heads can be shared out.

    Attributes:
        kinds: of each HF tensor, which of `DeltaNetSizes.of_head` it has.
        grouped: whether its rows are head by head too, else kind by kind.
    """

    kinds: tuple[tuple[int, ...], ...]
    grouped: bool

    def merge(self, tensors: list[torch.Tensor], shape: ModelConfig) -> torch.Tensor:
        sizes = DeltaNetSizes.of(shape)
        parts = [
            part.reshape(sizes.key_heads, -1, *tensor.shape[1:])
            for tensor, kinds in zip(tensors, self.kinds, strict=True)
            for part in self._parts(tensor, kinds, sizes)
        ]
        return joined(parts, dim=1).flatten(0, 1)

    def _parts(
        self, tensor: torch.Tensor, kinds: tuple[int, ...], sizes: DeltaNetSizes
    ) -> Sequence[torch.Tensor]:
        if self.grouped:
            return [tensor]
        return tensor.split([sizes.key_heads * sizes.of_head[kind] for kind in kinds])

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        sizes = DeltaNetSizes.of(shape)
        heads = param.reshape(sizes.key_heads, -1, *param.shape[1:])
        widths = [[sizes.of_head[kind] for kind in kinds] for kinds in self.kinds]
        if self.grouped:
            return [part.flatten(0, 1) for part in heads.split([sum(width) for width in widths], dim=1)]
        parts = iter(heads.split([rows for width in widths for rows in width], dim=1))
        return [joined([next(parts).flatten(0, 1) for _ in width]) for width in widths]


def delta_nets(in_proj: ByKeyHead) -> LayerKind:
    """Layers with the names of megatron-core's gated delta net in the place of attention."""
    named = {"A_log": "A_log", "dt_bias": "dt_bias", "out_norm.weight": "norm.weight"}
    named["out_proj.weight"] = "out_proj.weight"
    rules = {
        "self_attention.in_proj.weight": in_proj.under("linear_attn."),
        "self_attention.conv1d.weight": ByKeyHead(("linear_attn.conv1d.weight",), ((0, 1, 2),), False),
        **{f"self_attention.{ours}": Rule((f"linear_attn.{theirs}",)) for ours, theirs in named.items()},
    }
    return LayerKind(lambda shape: shape.linear_attention_freq, rules, instead_of="self_attention.")


def delta_net_tensors(shape: ModelShape) -> Iterator[tuple[str, Sizes]]:
    """The shapes of the tensors of such a layer in a checkpoint, however its projections are joined there."""
    if shape.linear is None:
        return
    sizes, hidden = DeltaNetSizes.of(shape.linear), shape.hidden_size
    heads = sizes.key_heads * sizes.ratio
    values = heads * sizes.value
    rows = {"in_proj_qkv": sizes.mixed, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    rows |= {"in_proj_qkvz": sizes.mixed + values, "in_proj_ba": 2 * heads}
    yield from ((f"linear_attn.{name}.weight", (count, hidden)) for name, count in rows.items())
    yield "linear_attn.conv1d.weight", (sizes.mixed, 1, sizes.kernel)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", (sizes.value,)
    yield "linear_attn.out_proj.weight", (hidden, values)


_GATED = GatedQkvRule(tuple(f"self_attn.{part}_proj.weight" for part in "qkv"))
GATED_LAYER = {
    **{name: rule for name, rule in DECODER_WEIGHTS.of_layer.items() if not name.endswith("linear_qkv.bias")},
    "self_attention.linear_qkv.weight": _GATED,
}
"""Rules of a layer with attention, whose output is gated."""


def hybrid_flops(seqlens: Sequence[int], shape: ModelConfig, mlp: Products) -> float:
    """Counts the FLOPs of a decoder some of whose layers are delta nets, the others having attention with an
    output gate.
    """
    hidden, width = shape.hidden_size, shape.num_attention_heads * shape.kv_channels
    linear = sum(shape.linear_attention_freq or ())
    full = shape.num_layers - linear
    attention = hidden * (3 * width + 2 * shape.num_query_groups * shape.kv_channels)
    products = full * attention + linear * _delta_net_products(shape) + mlp(shape)
    pairs = sum(length * (length + 1) / 2 for length in seqlens)
    products += hidden * shape.padded_vocab_size
    return 2 * products * sum(seqlens) + 4 * full * width * pairs


def _delta_net_products(shape: ModelConfig) -> int:
    """Multiply-adds of one token: projections, convolution, and reading, correcting and writing the state."""
    sizes, hidden = DeltaNetSizes.of(shape), shape.hidden_size
    heads = sizes.key_heads * sizes.ratio
    projections = hidden * (sizes.projected + heads * sizes.value)
    return projections + sizes.kernel * sizes.mixed + 3 * heads * sizes.key * sizes.value
