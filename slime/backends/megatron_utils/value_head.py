"""The head of a critic: one number per token in the place of logits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

_INIT_STD = 0.02
_NAMES = ("output_layer.weight", "output_layer.bias")


class ValueHead(torch.nn.Module):
    """A linear layer with a bias from the hidden state to one float32; the same on all tensor-parallel ranks.

    Under sequence parallelism each rank computes the values of its part of the row, and they are gathered:
    ``sequence_parallel`` of the parameters makes megatron-core sum their gradients. The weights start as
    N(0, 0.02^2) of a generator of their own, so that every layout starts with the same.
    """

    def __init__(self, config: TransformerConfig, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(1, config.hidden_size).normal_(0, _INIT_STD, generator=generator)
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            vars(parameter).update(sequence_parallel=config.sequence_parallel, is_value_head=True)

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """[T, 1, hidden] -> ([T, 1, 1], None), as megatron-core calls its output layer."""
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def is_of_value_head(parameter: torch.Tensor) -> bool:
    """Whether it is none of the trunk's, which other checkpoints have, too."""
    return getattr(parameter, "is_value_head", False)


def kept_head(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the value head as they are; empty where there is none."""
    head = getattr(model, "output_layer", None)
    if not isinstance(head, ValueHead):
        return {}
    return dict(zip(_NAMES, (head.weight.detach(), head.bias.detach()), strict=True))


def without_foreign_head(template: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """What to load of a model's sharded weights: not a value head, if ``path`` has no such thing.

    Args:
        template: of one model chunk, or of several under their numbers.
    """
    if all(isinstance(chunk, Mapping) for chunk in template.values()):
        return {number: without_foreign_head(chunk, path) for number, chunk in template.items()}
    if _NAMES[1] not in template:
        return dict(template)
    saved = dist_checkpointing.load_tensors_metadata(str(path))
    if _NAMES[1] in saved:
        return dict(template)
    return {name: value for name, value in template.items() if name not in _NAMES}
