"""GLM-4 (0414): norms behind attention and MLP too; half of a head is rotated, in pairs of neighbours."""

from dataclasses import replace

from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.family import Family
from slime.models.hf_config import HfConfig
from slime.models.rope import read_rope
from slime.models.rules import FusedGateUpRule, Rule
from slime.models.shape import ModelShape

# Glm4Config's.
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "attention_bias": True, "rms_norm_eps": 1.5625e-07}


def _shape(config: HfConfig) -> ModelShape:
    return decoder_shape(
        config.filled(**_DEFAULTS),
        rope=read_rope(config, percent=0.5, interleaved=True),
        add_output_bias=False,  # attention_bias is about query, key and value
        post_self_attn_layernorm=True,
        post_mlp_layernorm=True,
    )


_LAYER = {
    **DECODER_WEIGHTS.of_layer,
    "post_self_attn_layernorm.weight": Rule(("post_self_attn_layernorm.weight",)),
    "post_mlp_layernorm.weight": Rule(("post_mlp_layernorm.weight",)),
    "mlp.linear_fc1.weight": FusedGateUpRule(("mlp.gate_up_proj.weight",)),
}

FAMILY = Family(shape=_shape, weights=replace(DECODER_WEIGHTS, of_layer=_LAYER))
