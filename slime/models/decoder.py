"""What decoders in the manner of Llama have in common."""

from dataclasses import replace
from typing import Any

from slime.config.model import ModelConfig
from slime.models.hf_config import HfConfig
from slime.models.rope import read_rope
from slime.models.rules import GateUpRule, QkvRule, Rule, VocabRule, WeightMap
from slime.models.shape import ModelShape

_MAX_LAYERS = 100_000
SEES_ALL, LOCAL = "full_attention", "sliding_attention"


def decoder_shape(config: HfConfig, **overrides: Any) -> ModelShape:
    """The shape that the usual names of config.json give; a family overrides what it does otherwise.

    Raises:
        HfConfigError: a missing field, or a feature that is not computed.
    """
    config.require(hidden_act=overrides.get("activation", "silu"), use_sliding_window=False)
    heads, hidden_size = config.size("num_attention_heads"), config.size("hidden_size")
    groups = config.size("num_key_value_heads", heads)
    if heads % groups:
        raise config.wrong("num_key_value_heads", groups, f"a divisor of num_attention_heads {heads}")
    has_bias = config.switch("attention_bias")
    shape = ModelShape(
        model_type=config.get("model_type"),
        num_layers=config.size("num_hidden_layers", at_most=_MAX_LAYERS),
        hidden_size=hidden_size,
        ffn_hidden_size=config.size("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=config.size("head_dim", max(1, hidden_size // heads)),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=config.size("max_position_embeddings"),
        untie_embeddings_and_output_weights=not config.switch("tie_word_embeddings"),
        rope=overrides.pop("rope", None) or read_rope(config),
        add_qkv_bias=has_bias,
        add_output_bias=has_bias,
        add_mlp_bias=config.switch("mlp_bias"),
    )
    return replace(shape, **overrides)


def attention_windows(config: HfConfig, num_layers: int, window: int, pattern: int) -> tuple[int | None, ...]:
    """How many tokens each layer sees, None for all.

    Args:
        config: says it by ``layer_types``, or by ``sliding_window_pattern``.
        num_layers: of the model.
        window: where ``sliding_window`` is missing.
        pattern: each layer of such a number sees all, where config.json says neither.
    """
    window, pattern = config.size("sliding_window", window), config.size("sliding_window_pattern", pattern)
    default = [LOCAL if (layer + 1) % pattern else SEES_ALL for layer in range(num_layers)]
    kinds = config.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != num_layers or {*kinds} - {SEES_ALL, LOCAL}:
        raise config.wrong("layer_types", kinds, f"{SEES_ALL} or {LOCAL} for each of {num_layers} layers")
    return tuple(window if kind == LOCAL else None for kind in kinds)


def _qkv(kind: str) -> QkvRule:
    return QkvRule(tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv"))


def decoder_absent(shape: ModelConfig) -> set[str]:
    """Names that models of a shape do not have."""
    there = {
        "self_attention.linear_qkv.bias": shape.add_qkv_bias,
        "self_attention.q_layernorm.weight": shape.qk_layernorm,
        "self_attention.k_layernorm.weight": shape.qk_layernorm,
        "output_layer.weight": shape.untie_embeddings_and_output_weights,
    }
    return {name for name, present in there.items() if not present}


DECODER_WEIGHTS = WeightMap(
    of_model={
        "embedding.word_embeddings.weight": VocabRule(("model.embed_tokens.weight",)),
        "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
        "output_layer.weight": VocabRule(("lm_head.weight",)),
    },
    layer_prefix="model.layers.{}.",
    of_layer={
        "input_layernorm.weight": Rule(("input_layernorm.weight",)),
        "pre_mlp_layernorm.weight": Rule(("post_attention_layernorm.weight",)),
        "self_attention.linear_qkv.weight": _qkv("weight"),
        "self_attention.linear_qkv.bias": _qkv("bias"),
        "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",)),
        "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",)),
        "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",)),
        "mlp.linear_fc1.weight": GateUpRule(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",)),
    },
    absent=decoder_absent,
)
