"""gpt-oss: sinks in attention, every other layer with a window, biases everywhere, a clamped activation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from slime.config.model import ModelConfig
from slime.models.decoder import DECODER_WEIGHTS, attention_windows, decoder_shape
from slime.models.experts import moe_forward_flops, softmax_experts
from slime.models.family import Family, InSglang
from slime.models.hf_config import HfConfig
from slime.models.rope import read_rope
from slime.models.rules import ExpertRules, GateUpRule, Rule, joined
from slime.models.shape import ModelShape

if TYPE_CHECKING:
    import torch

_ALPHA, _LIMIT = 1.702, 7.0  # GptOssConfig's defaults; megatron-core's quick GELU has this alpha


# What GptOssConfig takes for the rotary embedding where config.json says nothing of it.
_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}


def _shape(config: HfConfig) -> ModelShape:
    config = config.filled(num_key_value_heads=8, rms_norm_eps=1e-5, attention_bias=True)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = replace(config, values={**config.values, "rope_scaling": _ROPE})
    config.require(attention_bias=True, swiglu_alpha=_ALPHA)
    shape = decoder_shape(
        config,
        rope=read_rope(config, base=150000.0),
        kv_channels=config.size("head_dim", 64),
        add_output_bias=False,  # that of add_bias_linear
        add_bias_linear=True,
        softmax_type="learnable",
        glu_linear_offset=1.0,
        activation_func_clamp_value=config.number("swiglu_limit", _LIMIT),
    )
    layers = (1,) * shape.num_layers
    return replace(
        shape,
        activation="quick_gelu",
        attention_windows=attention_windows(config, shape.num_layers, window=128, pattern=2),
        moe=softmax_experts(config, shape.ffn_hidden_size, sums_to_one=True, layers=layers),
    )


@dataclass(frozen=True)
class TransposedRule(Rule):
    """A matrix that the checkpoint has transposed."""

    def merge(self, tensors: list[torch.Tensor], shape: ModelConfig) -> torch.Tensor:
        return tensors[0].T

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        return [param.T]


@dataclass(frozen=True)
class InterleavedGateUpRule(GateUpRule):
    """Gate over up. In the checkpoint they take turns, and matrices are transposed."""

    def merge(self, tensors: list[torch.Tensor], shape: ModelConfig) -> torch.Tensor:
        rows = tensors[0].movedim(-1, 0)
        return joined([rows[0::2], rows[1::2]])

    def split(self, param: torch.Tensor, shape: ModelConfig) -> list[torch.Tensor]:
        gate, up = param.chunk(2)
        return [joined([gate[:, None], up[:, None]], dim=1).flatten(0, 1).movedim(0, -1)]


_BIASES = {
    "self_attention.linear_proj.bias": Rule(("self_attn.o_proj.bias",)),
    "self_attention.core_attention.softmax_offset": Rule(("self_attn.sinks",)),
}
_EXPERTS = ExpertRules(
    of_layer={
        "mlp.router.weight": Rule(("mlp.router.weight",)),
        "mlp.router.bias": Rule(("mlp.router.bias",)),
    },
    of_expert={
        "linear_fc1.weight": InterleavedGateUpRule(("gate_up_proj",)),
        "linear_fc1.bias": InterleavedGateUpRule(("gate_up_proj_bias",)),
        "linear_fc2.weight": TransposedRule(("down_proj",)),
        "linear_fc2.bias": Rule(("down_proj_bias",)),
    },
    prefix="mlp.experts.",
    stacked=True,
)

FAMILY = Family(
    shape=_shape,
    weights=replace(DECODER_WEIGHTS, of_layer={**DECODER_WEIGHTS.of_layer, **_BIASES}, experts=_EXPERTS),
    forward_flops=moe_forward_flops,
    attention="sinks",
    in_mxfp4=True,
    in_sglang=InSglang(own_head=True),
)
