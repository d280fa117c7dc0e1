"""Low-rank adapters beside the linear layers of a ``transformers`` model.

Layers keep their places and their names, where PEFT would put others in their place: so weights are those of
the model without adapters for FSDP, checkpoints and conversions.
"""

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from slime.adapters.linears import linears
from slime.adapters.lora import initial_down, product
from slime.adapters.peft_format import left_over, misfit, read_adapter, tensor_name
from slime.adapters.targets import is_named, is_target, names_module, no_target, without_adapter
from slime.backends.fsdp_utils.named_tensors import stored_shapes
from slime.backends.fsdp_utils.optimizer import local
from slime.backends.fsdp_utils.shards import fill, on_first_rank
from slime.config.lora import ALL_LINEAR, LoraConfig

_WEIGHT = ".weight"
_PARTS = "lora_A", "lora_B"


class Adapter(torch.nn.Module):
    """A [rank, in] and B [out, rank] of a linear layer, which a forward hook of it adds to its output.

    Attributes:
        module: the Hugging Face name of the layer.
        scale: the factor of what it gives.
        used: whether a forward pass has called it.
    """

    def __init__(self, module: str, linear: torch.nn.Linear, config: LoraConfig, seed: int) -> None:
        super().__init__()
        self.module, self.scale, self.used = module, config.lora_scale, False
        self._dropout = config.lora_dropout
        down = initial_down(module, config.lora_rank, linear.in_features, seed)
        self.lora_A = torch.nn.Parameter(down.to(linear.weight))
        self.lora_B = torch.nn.Parameter(linear.weight.new_zeros(linear.out_features, config.lora_rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What it adds to the output of the layer for its input ``x``."""
        self.used = True
        dropped = F.dropout(x, self._dropout, self.training)
        return product(product(dropped, self.lora_A) * self.scale, self.lora_B)

    def parts(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields A and B under the names that PEFT has for them."""
        return ((tensor_name(self.module, part), getattr(self, part)) for part in _PARTS)


def attach_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freezes the model and gives its targets adapters.

    Raises:
        ValueError: a target names nothing, or what cannot have one; or no layer is a target.
    """
    model.requires_grad_(False)
    layers = {model._weight_prefix.outer(name): linear for name, linear in linears(model).items()}
    _require_targets(model, config, layers.keys())
    for module, linear in layers.items():
        if is_target(config, module):
            linear.adapters = Adapter(module, linear, config, seed)
            linear.register_forward_hook(_add)


def _require_targets(model: PreTrainedModel, config: LoraConfig, layers: Collection[str]) -> None:
    shapes = stored_shapes(model).items()
    matrices = [n.removesuffix(_WEIGHT) for n, shape in shapes if len(shape) == 2 and n.endswith(_WEIGHT)]
    for pattern in config.lora_target_modules:
        if pattern != ALL_LINEAR and not any(names_module(pattern, module) for module in matrices):
            raise ValueError(
                f"--lora-target-modules {pattern}: no linear layer of {type(model).__name__} (wanted: "
                f"{ALL_LINEAR}, a name such as {min(layers, key=len, default=ALL_LINEAR)}, its end, or a "
                "regex of all of it)"
            )
    for module in matrices:
        if module not in layers and is_named(config, module) and is_target(config, module):
            raise without_adapter(config, module)
    if not any(is_target(config, module) for module in layers):
        raise no_target(config)


def _add(linear: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    added: torch.Tensor = linear.adapters(inputs[0])
    return output + added


def adapters_of(model: torch.nn.Module) -> dict[str, Adapter]:
    """The adapters by the names of the weights that they add to."""
    return {
        name.rpartition(".")[0] + _WEIGHT: module
        for name, module in model.named_modules()
        if isinstance(module, Adapter)
    }


def require_used(model: torch.nn.Module) -> None:
    """Refuses to train an adapter that no forward pass has called: it would stay as it is.

    Raises:
        ValueError: names the first.
    """
    for adapter in adapters_of(model).values():
        if not adapter.used:
            raise ValueError(
                f"--lora-target-modules: {adapter.module} has an adapter that nothing computes, as the model "
                "takes its weight otherwise than by calling it (wanted: --lora-exclude-modules "
                f"{adapter.module.rpartition('.')[2]})"
            )


@torch.no_grad()
def turn_off(model: torch.nn.Module) -> None:
    """Makes the adapters add nothing."""
    for adapter in adapters_of(model).values():
        local(adapter.lora_B).zero_()


@torch.no_grad()
def load_peft(path: str | Path, model: torch.nn.Module) -> None:
    """Collective. Fills the adapters with those at ``path``.

    Raises:
        ValueError: the adapter cannot be read, or is of other modules or shapes.
    """
    wanted = dict(part for adapter in adapters_of(model).values() for part in adapter.parts())
    found = on_first_rank(f"--lora-adapter-path {path}", partial(_read, path, wanted))
    for name, param in wanted.items():
        fill(param, None if found is None else found[name])


def _read(path: str | Path, wanted: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    found = read_adapter(path)
    for name, param in wanted.items():
        if name not in found or found[name].shape != param.shape:
            raise ValueError(misfit(name, found.get(name), param.shape))
    if others := sorted(found.keys() - wanted.keys()):
        raise ValueError(left_over(others))
    return found
