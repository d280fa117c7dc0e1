"""Checkpoints that Megatron-LM or its converter wrote: their weights, and nothing else of them.

Their ``common.pt`` is a pickle of flags, which is never resolved. Weights need no translation: the layers of
megatron-core save norms under the names that TransformerEngine's fused layers have for them
(``mlp.linear_fc1.layer_norm_weight``).
"""

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

_NUMBERED_LAYER = re.compile(r"(^|\.)decoder\.layers\.\d+\.")


class NothingInCommon(TorchCommonLoadStrategy):
    """Leaves ``common.pt`` unread."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return {}


def read_common(path: str | Path) -> dict[str, Any] | None:
    """The plain values of a checkpoint of this trainer's; None if something else wrote it."""
    try:
        saved = dist_checkpointing.load_common_state_dict(str(path))
    except pickle.UnpicklingError:
        return None
    return saved if "common" in saved else None


def split_objects(model: dict[str, Any]) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """The tensors of a model's sharded state, and what adds an empty value for each object to loaded ones.

    The objects are ``_extra_state``, where TransformerEngine pickles float8 scales for which the layers here
    have no use.

    Args:
        model: of one model chunk, or of several under their numbers.
    """
    if all(isinstance(chunk, dict) for chunk in model.values()):
        parts = {number: split_objects(chunk) for number, chunk in model.items()}
        tensors = {number: part for number, (part, _) in parts.items()}
        return tensors, lambda loaded: {n: restore(loaded[n]) for n, (_, restore) in parts.items()}
    objects = [name for name, value in model.items() if isinstance(value, ShardedObject)]
    tensors = {name: value for name, value in model.items() if name not in objects}
    return tensors, lambda loaded: {**loaded, **dict.fromkeys(objects)}


def layer_naming(path: str | Path) -> dict[str, Any]:
    """How a checkpoint names layers: each by its number, or all under one name with an axis of their own."""
    names = dist_checkpointing.load_tensors_metadata(str(path))
    return {"non_homogeneous_layers": any(_NUMBERED_LAYER.search(name) for name in names)}


def numbers_layers_of_optimizer(path: str | Path) -> bool:
    """Tells whether a checkpoint numbers layers in its optimizer state."""
    names = dist_checkpointing.load_tensors_metadata(str(path))
    return any(name.startswith("optimizer.") and _NUMBERED_LAYER.search(name) for name in names)


@contextmanager
def under_one_name(chunks: Sequence[torch.nn.Module], naming: Mapping[str, Any]) -> Iterator[None]:
    """Has megatron-core name layers alike meanwhile if ``naming`` says so and all of them have experts.

    It takes a list of the layers with experts for layers of several kinds, even where they are of one.
    """
    every: list[Any] = [chunk.config for chunk in chunks]
    configs = {id(config): config for config in every}.values()
    before = [config.moe_layer_freq for config in configs]
    for config, layers in zip(configs, before, strict=True):
        if not naming.get("non_homogeneous_layers", True) and isinstance(layers, list) and all(layers):
            config.moe_layer_freq = 1
    try:
        yield
    finally:
        for config, layers in zip(configs, before, strict=True):
            config.moe_layer_freq = layers
