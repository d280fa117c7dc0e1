"""``--spec slime_plugins.models.glm5 get_glm5_spec``: sparse attention, as config.json asks for anyway."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron_utils.layer_spec import layer_spec
from slime_plugins.models.lightning_indexer import IndexerSizes
from slime_plugins.models.passed_choice import EdgeLayer
from slime_plugins.models.sparse_attention import SparseCoreAttention, SparseLatentAttention


def get_glm5_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of a pipeline stage of GLM-5 or DeepSeek-V3.2."""
    block = layer_spec(args, config, vp_stage)
    indexers = IndexerSizes.of(args)
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        parts: Any = layer.submodules
        parts.self_attention = _sparse(parts.self_attention, indexers)
    _join_stages(block.layer_specs, get_transformer_layer_offset(config, vp_stage), indexers)
    return block


def _join_stages(layers: list[ModuleSpec], first: int, indexers: IndexerSizes) -> None:
    """Has the layers at the edges of a stage, which begins with ``first``, pass on what others share."""
    if not layers:
        return
    following = first + len(layers)
    choice_in = None if indexers.kinds[first] else indexers.source(first)
    shares = following < len(indexers.kinds) and not indexers.kinds[following]
    choice_out = indexers.source(following) if shares else None
    for place in {0, len(layers) - 1}:
        edge = {
            "choice_in": choice_in if place == 0 else None,
            "choice_out": choice_out if place == len(layers) - 1 else None,
        }
        if edge != dict.fromkeys(edge):
            layers[place] = replace(layers[place], module=EdgeLayer, params=layers[place].params | edge)


def _sparse(attention: ModuleSpec, indexers: IndexerSizes) -> ModuleSpec:
    core = replace(attention.submodules.core_attention, module=SparseCoreAttention)
    return replace(
        attention,
        module=SparseLatentAttention,
        params=attention.params | {"indexers": indexers},
        submodules=replace(attention.submodules, core_attention=core),
    )
