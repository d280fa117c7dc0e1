"""The linear layers of a ``transformers`` model that can have an adapter."""

import re
from typing import TYPE_CHECKING

import torch

from slime.models.families.deepseek_v32 import is_of_indexer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_APART = re.compile(r"(^|\.)(experts|\w*(router|gate|gating))(\.|$)")
"""Experts, what chooses between them, and what weighs the shared one."""


def linears(model: "PreTrainedModel") -> dict[str, torch.nn.Linear]:
    """Finds those of the decoder by their names in the model: not the head, no expert, router or indexer."""
    decoder, head = {id(module) for module in model.base_model.modules()}, model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and id(module) in decoder
        and module is not head
        and not (_APART.search(name) or is_of_indexer(name))
    }
