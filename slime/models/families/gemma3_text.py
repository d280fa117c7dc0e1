"""Gemma 3, text: layers that see a window, norms behind attention and MLP too, scaled embeddings."""

from dataclasses import replace

from slime.models.decoder import DECODER_WEIGHTS, LOCAL, SEES_ALL, attention_windows, decoder_shape
from slime.models.family import Family, nested_family
from slime.models.hf_config import HfConfig
from slime.models.rope import Rope, read_rope
from slime.models.rules import Rule
from slime.models.shape import ModelShape
from slime.models.weight_prefix import WeightPrefix

# Gemma3TextConfig's, which published files leave out.
_DEFAULTS = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    **{"max_position_embeddings": 131072, "tie_word_embeddings": True},
}


def _shape(config: HfConfig) -> ModelShape:
    config.require(
        hidden_activation="gelu_pytorch_tanh",
        final_logit_softcapping=None,
        attn_logit_softcapping=None,
        use_bidirectional_attention=False,
    )
    rope, local = _ropes(config)
    shape = decoder_shape(
        config.filled(**_DEFAULTS),
        rope=rope,
        local_rope=local,
        activation="gelu_pytorch_tanh",
        kv_channels=config.size("head_dim", 256),
        qk_layernorm=True,
        post_self_attn_layernorm=True,
        post_mlp_layernorm=True,
        layernorm_zero_centered_gamma=True,
        softmax_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_factor=config.size("hidden_size") ** 0.5,
    )
    return replace(shape, attention_windows=attention_windows(config, shape.num_layers, 4096, pattern=6))


def _ropes(config: HfConfig) -> tuple[Rope, Rope]:
    """Returns the RoPE of layers that see all, and of the others; transformers 5 has one mapping for both."""
    nested = config.mapping("rope_parameters")
    if not nested:
        return read_rope(config, base=1e6), Rope(config.number("rope_local_base_freq", 10000.0))
    both = (nested.get(kind) or {} for kind in (SEES_ALL, LOCAL))
    every, local = (HfConfig({"rope_parameters": values}, config.origin) for values in both)
    return read_rope(every, base=1e6), read_rope(local)


_NORMS = {
    "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
    "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
}
_LAYER = {**DECODER_WEIGHTS.of_layer, **{ours: Rule((theirs,)) for ours, theirs in _NORMS.items()}}

FAMILY = Family(shape=_shape, weights=replace(DECODER_WEIGHTS, of_layer=_LAYER))
WITH_IMAGES = nested_family(
    FAMILY,
    WeightPrefix("language_model.model.", "language_model.lm_head."),
    ("vision_tower.", "multi_modal_projector."),
    tied=True,
)
