"""``--spec slime_plugins.models.glm5 get_glm5_spec``: sparse attention, as config.json asks for anyway.

Chosen keys go on to the next pipeline stage where it begins with a layer that shares an earlier indexer: they
travel with the hidden states, as further features of each row, whose bits are those of integers.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from slime.backends.megatron_utils.layer_spec import layer_spec
from slime.training.packed_layout import PackedLayout
from slime_plugins.models.lightning_indexer import Choice, IndexerSizes, left_by
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


class EdgeLayer(TransformerLayer):
    """The first or the last layer of a stage.

    ``choice_in`` is the layer whose choice comes with its input, ``choice_out`` the one whose choice goes
    with its output; None for neither.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        *args: Any,
        choice_in: int | None,
        choice_out: int | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        self._choice_in, self._choice_out = choice_in, choice_out

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """hidden_states [rows, 1, hidden], and what is chosen behind the hidden features."""
        layout = PackedLayout.of(kwargs["packed_seq_params"])
        if self._choice_in is not None:
            hidden_states, choice = self._narrowed(hidden_states, layout)
            layout.left[left_by(self._choice_in)] = choice
        output, context = super().forward(hidden_states, *args, **kwargs)
        if self._choice_out is not None:
            output = self._widened(output, layout.left[left_by(self._choice_out)], layout)
        return output, context

    def _widened(self, hidden: torch.Tensor, choice: Choice, layout: PackedLayout) -> torch.Tensor:
        if choice.is_everything:
            return hidden
        rows = choice.rows(layout)
        if self.config.sequence_parallel:
            rows = scatter_to_sequence_parallel_region(rows)
        return torch.cat([hidden, rows.view(hidden.dtype)[:, None]], dim=-1)

    def _narrowed(self, wide: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, Choice]:
        width = self.config.hidden_size
        if wide.size(-1) == width:
            return wide, Choice.of_all(layout)
        rows = wide[:, 0, width:].detach().contiguous().view(torch.int32)
        if self.config.sequence_parallel:
            rows = gather_from_sequence_parallel_region(rows)
        return wide[..., :width].contiguous(), Choice.of_rows(rows, layout)
