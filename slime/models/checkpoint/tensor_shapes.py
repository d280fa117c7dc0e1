"""The shapes of a family's tensors in a checkpoint, which ``config.json`` decides; needs no torch.

``TensorShapes(shape).of("model.layers.0.mlp.experts.7.up_proj.weight")``
"""

import re
from collections.abc import Iterator

from slime.config.model import LatentShape, MoeShape
from slime.models.families import FAMILIES
from slime.models.rules import FusedGateUpRule
from slime.models.shape import ModelShape, Sizes

_LAYER = re.compile(r"model\.layers\.\d+\.(.+)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ANY_EXPERT = ".experts.{}."
_NORMS = (
    *("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_PARTS, _MIXTRAL_PARTS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


class TensorShapes:
    """Knows the shapes of the tensors of one model."""

    def __init__(self, shape: ModelShape) -> None:
        family = FAMILIES[shape.model_type]
        self._prefix = family.weights.prefix
        words = (shape.vocab_size, shape.hidden_size)
        self._of_model: dict[str, Sizes] = {
            "model.embed_tokens.weight": words,
            "lm_head.weight": words,
            "model.norm.weight": (shape.hidden_size,),
        }
        self._in_layer = {**dict(_in_layer(shape)), **dict(family.own_tensors(shape))}

    def of(self, name: str) -> Sizes | None:
        """Returns the shape of a tensor of this name; None where it is not known."""
        inner = self._prefix.inner(name)
        if layer := _LAYER.fullmatch(inner):
            return self._in_layer.get(_EXPERT.sub(_ANY_EXPERT, layer[1]))
        return self._of_model.get(inner)


def _in_layer(shape: ModelShape) -> Iterator[tuple[str, Sizes]]:
    yield from ((f"{name}.weight", (shape.hidden_size,)) for name in _NORMS)
    yield from _latent(shape, shape.latent) if shape.latent else _attention(shape)
    yield from _mlp("mlp.", _PARTS, shape.ffn_hidden_size, shape.hidden_size)
    yield "mlp.gate_up_proj.weight", (2 * shape.ffn_hidden_size, shape.hidden_size)
    if shape.moe:
        yield from _experts(shape, shape.moe)
        yield from _stacked_experts(shape, shape.moe)


def _attention(shape: ModelShape) -> Iterator[tuple[str, Sizes]]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads * shape.kv_channels
    groups = shape.num_query_groups * shape.kv_channels
    asked = heads * 2 if shape.attention_output_gate else heads  # a row of its gate for each row of a query
    for part, rows in (("q", asked), ("k", groups), ("v", groups)):
        yield f"self_attn.{part}_proj.weight", (rows, hidden)
        yield f"self_attn.{part}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, heads)
    yield "self_attn.o_proj.bias", (hidden,)
    yield "self_attn.sinks", (shape.num_attention_heads,)
    over_heads = shape.qk_norm_over_heads
    yield "self_attn.q_norm.weight", (heads if over_heads else shape.kv_channels,)
    yield "self_attn.k_norm.weight", (groups if over_heads else shape.kv_channels,)


def _latent(shape: ModelShape, latent: LatentShape) -> Iterator[tuple[str, Sizes]]:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    queries = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    if latent.q_lora_rank is None:
        yield "self_attn.q_proj.weight", (queries, hidden)
    else:
        yield "self_attn.q_a_proj.weight", (latent.q_lora_rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (latent.q_lora_rank,)
        yield "self_attn.q_b_proj.weight", (queries, latent.q_lora_rank)
    rank = latent.kv_lora_rank
    yield "self_attn.kv_a_proj_with_mqa.weight", (rank + latent.qk_pos_emb_head_dim, hidden)
    yield "self_attn.kv_a_layernorm.weight", (rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (latent.qk_head_dim + latent.v_head_dim), rank)
    yield "self_attn.o_proj.weight", (hidden, heads * latent.v_head_dim)


def _experts(shape: ModelShape, moe: MoeShape) -> Iterator[tuple[str, Sizes]]:
    hidden, experts = shape.hidden_size, moe.num_experts
    for router in ("mlp.gate", "mlp.router", "block_sparse_moe.gate"):
        yield f"{router}.weight", (experts, hidden)
    for bias in (
        "mlp.router.bias",
        *(f"{at}.e_score_correction_bias" for at in ("mlp.gate", "block_sparse_moe")),
    ):
        yield bias, (experts,)
    yield from _mlp(f"mlp{_ANY_EXPERT}", _PARTS, moe.moe_ffn_hidden_size, hidden)
    yield from _mlp(f"block_sparse_moe{_ANY_EXPERT}", _MIXTRAL_PARTS, moe.moe_ffn_hidden_size, hidden)
    if shared := moe.moe_shared_expert_intermediate_size:
        yield from _mlp("mlp.shared_expert.", _PARTS, shared, hidden)
        yield from _mlp("mlp.shared_experts.", _PARTS, shared, hidden)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _stacked_experts(shape: ModelShape, moe: MoeShape) -> Iterator[tuple[str, Sizes]]:
    """Yields tensors of all experts of a layer, each as if alone, or transposed where a family has it so."""
    hidden, experts, width = shape.hidden_size, moe.num_experts, moe.moe_ffn_hidden_size
    rules = FAMILIES[shape.model_type].weights.experts
    upright = rules is not None and isinstance(rules.of_expert["linear_fc1.weight"], FusedGateUpRule)
    both, down = (2 * width, hidden), (hidden, width)
    yield "mlp.experts.gate_up_proj", (experts, *(both if upright else both[::-1]))
    yield "mlp.experts.down_proj", (experts, *(down if upright else down[::-1]))
    yield "mlp.experts.gate_up_proj_bias", (experts, 2 * width)
    yield "mlp.experts.down_proj_bias", (experts, hidden)


def _mlp(prefix: str, parts: tuple[str, str, str], width: int, hidden: int) -> Iterator[tuple[str, Sizes]]:
    gate, up, down = parts
    yield f"{prefix}{gate}.weight", (width, hidden)
    yield f"{prefix}{up}.weight", (width, hidden)
    yield f"{prefix}{down}.weight", (hidden, width)
