"""The weights of a ``transformers`` model under the names of its checkpoints."""

import re
from collections.abc import Iterator
from itertools import groupby

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from slime.backends.embedded_engine.adapters import LinearLayer
from slime.backends.embedded_engine.model_config import ModelConfig
from slime.backends.embedded_engine.named_weights import ALIGNMENT, NamedWeights
from slime.models.checkpoint.tensor_views import view_at


class TransformersWeights(NamedWeights):
    """Moves a model's parameters, and the buffers that belong to checkpoints, into one flat buffer.

    ``transformers`` keeps some weights in another form than checkpoints do, the experts of a layer in one
    tensor for instance. Each tensor of a checkpoint is a view into that form. Which one is found by
    converting tensors of indices in the place of weights.
    """

    def __init__(self, config: ModelConfig, model: PreTrainedModel) -> None:
        super().__init__(config)
        own = dict(_unique_tensors(model))
        places, size = {}, 0
        for name, tensor in own.items():
            places[name] = size
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self.flat = torch.zeros(size, dtype=torch.uint8, device=config.device)
        for name, tensor in own.items():
            start, values = places[name], tensor.data
            end = start + tensor.numel() * tensor.element_size()
            tensor.data = self.flat[start:end].view(values.dtype).view(values.shape)
        self._name(model, own, places)
        self.embedding = model.get_input_embeddings().weight.data
        self._find_linear_layers(model)

    def _find_linear_layers(self, model: PreTrainedModel) -> None:
        """Fills ``linear_layers``, without the head, whose weight is read past its module."""
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
                outer = self._rules.prefix.outer(f"{name}.weight").removesuffix(".weight")
                shape = module.out_features, module.in_features
                self.linear_layers[outer] = LinearLayer(name, 0, module.out_features, shape)

    def _name(self, model: PreTrainedModel, own: dict[str, torch.Tensor], places: dict[str, int]) -> None:
        """Fills ``named``, layer by layer, as a conversion joins what is in one layer at most."""
        if (experts := self._rules.experts) is not None and experts.stacked:
            model._weight_conversions = []  # such checkpoints have them as transformers has
        for (_, dtype), pairs in groupby(own.items(), lambda pair: (_layer_of(pair[0]), pair[1].dtype)):
            indices = {
                name: torch.arange(tensor.numel()).add_(places[name] // dtype.itemsize).view(tensor.shape)
                for name, tensor in pairs
            }
            typed = self.flat.view(dtype)
            for name, found in revert_weight_conversion(model, indices).items():
                what = f"{self.config.shape.model_type}: weight {name!r}"
                self.named[self._rules.prefix.outer(name)] = view_at(typed, found, what)


def _unique_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a checkpoint, tied ones once, in an order in which neighbours share layer and
    dtype.
    """
    kept, seen = [], set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept.append((name, tensor))
    return iter(sorted(kept, key=lambda pair: (_layer_of(pair[0]), str(pair[1].dtype))))


def _layer_of(name: str) -> str:
    """``model.layers.3`` of every name in that layer, nothing elsewhere."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match[1] if match else ""
