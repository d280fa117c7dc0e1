"""DeepSeek-V3 and R1, Moonlight, Kimi K2: multi-latent attention, dense layers first, then experts."""

from collections.abc import Sequence
from dataclasses import replace

from slime.config.model import LatentShape, ModelConfig
from slime.models.decoder import DECODER_WEIGHTS, decoder_absent, decoder_shape
from slime.models.experts import DEEPSEEK_EXPERTS, shared_products, sigmoid_experts
from slime.models.family import Family
from slime.models.flops import latent_forward_flops
from slime.models.hf_config import HfConfig, HfConfigError
from slime.models.mtp import DEEPSEEK_MTP, behind_last_layer
from slime.models.rope import read_rope
from slime.models.rules import Rule
from slime.models.shape import ModelShape


def latent_attention_shape(config: HfConfig) -> ModelShape:
    """The shape of a decoder with multi-latent attention, its experts left to the family."""
    config.require(attention_bias=False)
    if "q_lora_rank" not in config.values:  # null says that there is no latent vector of queries
        raise HfConfigError(f"{config.origin}: q_lora_rank: missing (wanted: a number, or null)")
    latent = LatentShape(
        q_lora_rank=None if config.get("q_lora_rank") is None else config.size("q_lora_rank"),
        kv_lora_rank=config.size("kv_lora_rank"),
        qk_head_dim=config.size("qk_nope_head_dim"),
        qk_pos_emb_head_dim=config.size("qk_rope_head_dim"),
        v_head_dim=config.size("v_head_dim"),
    )
    return decoder_shape(
        config,
        rope=read_rope(config, interleaved=config.get("rope_interleave", True)),
        num_query_groups=config.size("num_attention_heads"),
        kv_channels=latent.v_head_dim,
        qk_layernorm=True,
        latent=latent,
    )


def latent_shape(config: HfConfig, default_dense: int) -> ModelShape:
    """Returns the shape of latent attention with experts in the manner of DeepSeek-V3."""
    shape = latent_attention_shape(config)
    return replace(shape, moe=sigmoid_experts(config, shape, default_dense))


def _shape(config: HfConfig) -> ModelShape:
    return latent_shape(config.filled(num_key_value_heads=128), default_dense=3)


def _absent(shape: ModelConfig) -> set[str]:
    direct, latent = "linear_q_proj", ("linear_q_down_proj", "q_layernorm", "linear_q_up_proj")
    names = latent if shape.q_lora_rank is None else (direct,)
    return decoder_absent(shape) | {f"self_attention.{name}.weight" for name in names}


_ATTENTION = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
_REST = {name: rule for name, rule in DECODER_WEIGHTS.of_layer.items() if "self_attention" not in name}

LATENT_WEIGHTS = replace(
    DECODER_WEIGHTS,
    of_layer=_REST
    | {
        f"self_attention.{ours}.weight": Rule((f"self_attn.{theirs}.weight",))
        for ours, theirs in _ATTENTION.items()
    },
    absent=_absent,
    experts=DEEPSEEK_EXPERTS,
    untrained=behind_last_layer,
    mtp=DEEPSEEK_MTP,
)


def latent_moe_flops(seqlens: Sequence[int], shape: ModelConfig) -> float:
    """Counts the FLOPs of a forward pass."""
    return latent_forward_flops(seqlens, shape, shared_products)


FAMILY = Family(shape=_shape, weights=LATENT_WEIGHTS, forward_flops=latent_moe_flops)
KIMI_K2 = replace(FAMILY, known_to_transformers_as="deepseek_v3")
