"""The tensors of a model under its own names, and in the form in which checkpoints have them."""

import re
from collections.abc import Iterator
from itertools import groupby

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from slime.adapters.targets import is_of_adapter
from slime.training.weights import NamedTensors


def named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter or saved buffer) without adapters, what is tied once, under the first of its names."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and not is_of_adapter(name):
            seen.add(id(tensor))
            yield name, tensor


def units(model: PreTrainedModel) -> Iterator[NamedTensors]:
    """Tensors that a conversion may join stay together: those of a layer."""
    if not any(isinstance(each, WeightConverter) for each in model._weight_conversions):
        yield from ([pair] for pair in named_tensors(model))
        return
    for _, pairs in groupby(named_tensors(model), lambda pair: _layer_of(pair[0])):
        yield list(pairs)


def as_in_checkpoints(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A unit's tensors in the form and under the names of checkpoints; views of them where possible."""
    if model._weight_conversions:
        tensors = revert_weight_conversion(model, tensors)
    return {model._weight_prefix.outer(name): tensor for name, tensor in tensors.items()}


def stored_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """The shapes of all tensors of a checkpoint by their names there."""
    shapes: dict[str, torch.Size] = {}
    for unit in units(model):
        empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in unit}
        shapes |= {name: tensor.shape for name, tensor in as_in_checkpoints(model, empty).items()}
    return shapes


def _layer_of(name: str) -> str:
    """``model.layers.3`` of every name in that layer, the name itself elsewhere."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match[1] if match else name
