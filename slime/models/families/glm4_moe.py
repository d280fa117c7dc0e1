"""GLM-4.5, 4.6 and 4.7: dense layers first, then mixtures of experts in the manner of DeepSeek-V3."""

from dataclasses import replace

from slime.models.decoder import DECODER_WEIGHTS, decoder_shape
from slime.models.experts import DEEPSEEK_EXPERTS, shared_forward_flops, sigmoid_experts
from slime.models.family import Family, InSglang
from slime.models.hf_config import HfConfig
from slime.models.mtp import DEEPSEEK_MTP, behind_last_layer
from slime.models.rope import read_rope
from slime.models.shape import ModelShape


def _shape(config: HfConfig) -> ModelShape:
    shape = decoder_shape(
        config.filled(num_key_value_heads=8, rms_norm_eps=1e-5),
        rope=read_rope(config, percent=0.5),
        add_output_bias=False,  # attention_bias is about query, key and value
        qk_layernorm=config.switch("use_qk_norm"),
    )
    return replace(shape, moe=sigmoid_experts(config, shape, default_dense=1))


FAMILY = Family(
    shape=_shape,
    weights=replace(DECODER_WEIGHTS, experts=DEEPSEEK_EXPERTS, untrained=behind_last_layer, mtp=DEEPSEEK_MTP),
    forward_flops=shared_forward_flops,
    in_sglang=InSglang(own_head=True),
)
