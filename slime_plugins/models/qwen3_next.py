"""``--spec slime_plugins.models.qwen3_next get_qwen3_next_spec``: delta nets where config.json has them."""

from argparse import Namespace
from dataclasses import replace
from typing import cast

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron_utils.layer_spec import layer_spec
from slime.config.model import ModelConfig
from slime.models.linear_attention import DeltaNetSizes
from slime_plugins.models.gated_delta_net import GatedDeltaNet


def get_qwen3_next_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of a pipeline stage, those that ``args.linear_attention_freq`` marks without attention."""
    block = layer_spec(args, config, vp_stage)
    first = get_transformer_layer_offset(config, vp_stage)
    linear = args.linear_attention_freq[first : first + len(block.layer_specs)]
    delta_net = ModuleSpec(module=GatedDeltaNet, params={"sizes": DeltaNetSizes.of(cast(ModelConfig, args))})
    block.layer_specs = [
        _with_delta_net(layer, delta_net) if is_linear else layer
        for layer, is_linear in zip(block.layer_specs, linear, strict=True)
    ]
    return block


def _with_delta_net(layer: ModuleSpec, delta_net: ModuleSpec) -> ModuleSpec:
    # In checkpoints no attention of TransformerEngine takes in this layer's first norm.
    names = {
        name: other
        for name, other in layer.submodules.sharded_state_dict_keys_map.items()
        if name != "input_layernorm."
    }
    parts = replace(layer.submodules, self_attention=delta_net, sharded_state_dict_keys_map=names)
    return replace(layer, submodules=parts)
