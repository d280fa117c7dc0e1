"""Chosen keys go on to the next pipeline stage where it begins with a layer that shares an earlier indexer.

They travel with the hidden states, as further features of each row, whose bits are those of integers.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime.training.packed_layout import PackedLayout
from slime_plugins.models.lightning_indexer import Choice, left_by


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
