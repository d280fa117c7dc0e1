"""The head of a critic: one number per token in the place of logits."""

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.checkpoint import FileSystemReader
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

_INIT_STD = 0.02
_PREFIX = "value_head."


class ValueHead(torch.nn.Module):
    """A linear layer with a bias from the hidden state to one float32.

    The weights start as N(0, 0.02^2) of a generator of their own: the same on all ranks, and as the Megatron
    trainer's.
    """

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(1, hidden_size).normal_(0, _INIT_STD, generator=generator)
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., 1]."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())


def is_of_value_head(name: str) -> bool:
    """Whether a parameter is none of the trunk's, which other checkpoints have, too."""
    return name.startswith(_PREFIX)


def add_value_head(model: PreTrainedModel, seed: int) -> None:
    """Makes a critic of a language model: its forward pass gives values in the place of logits.

    What a model does to its logits (a factor, a soft cap) is not done to values, so its own forward pass is
    not used: only that of its trunk.

    Raises:
        ValueError: the model does not say what its trunk and its output layer are.
    """
    trunk, output = model.base_model, model.get_output_embeddings()
    if trunk is model or output is None:
        raise ValueError(
            f"--advantage-estimator ppo: {type(model).__name__} does not tell its trunk from its "
            "output layer (wanted: an architecture that does, or an estimator without a critic)"
        )
    (place,) = [name for name, module in model.named_modules() if module is output]
    model.set_submodule(place, torch.nn.Identity())
    model.value_head = ValueHead(output.weight.shape[-1], seed)
    model.forward = _values(trunk, model.value_head)


def _values(trunk: torch.nn.Module, head: torch.nn.Module) -> Callable[..., CausalLMOutput]:
    @wraps(trunk.forward)
    def forward(*args: Any, **options: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=head(trunk(*args, **options).last_hidden_state))

    return forward


def without_foreign_head(tensors: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """What to load of a model's tensors: not a value head, if the checkpoint at ``path`` has none."""
    if not any(map(is_of_value_head, tensors)):
        return dict(tensors)
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: value for name, value in tensors.items() if not is_of_value_head(name) or name in saved}
