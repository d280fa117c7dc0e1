"""Layers for further tokens in checkpoints, which not all checkpoints of a model have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from slime.backends.megatron_utils.named_params import is_of_mtp


def require_mtp(template: Mapping[str, Any], path: str | Path) -> None:
    """Raises ValueError if a model has such layers and the checkpoint it goes on from has none.

    Args:
        template: sharded weights of one model chunk, or of several under their numbers.
    """
    if _has_mtp(template) and not _saved_with_mtp(path):
        raise ValueError(
            f"checkpoint {path}: has no layers for further tokens (wanted: another one, or no "
            "--enable-mtp-training)"
        )


def without_absent_mtp(template: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """What to load of a model's sharded weights: no such layers if ``path`` has none."""
    if not _has_mtp(template) or _saved_with_mtp(path):
        return dict(template)
    if _of_chunks(template):
        return {number: without_absent_mtp(chunk, path) for number, chunk in template.items()}
    return {name: value for name, value in template.items() if not is_of_mtp(name)}


def kept_mtp(model: torch.nn.Module) -> dict[str, Any]:
    """The weights of such layers as they are; empty where there are none."""
    layers = getattr(model, "mtp", None)
    return {} if layers is None else layers.state_dict(prefix="mtp.")


def _of_chunks(template: Mapping[str, Any]) -> bool:
    return all(isinstance(chunk, Mapping) for chunk in template.values())


def _has_mtp(template: Mapping[str, Any]) -> bool:
    if _of_chunks(template):
        return any(_has_mtp(chunk) for chunk in template.values())
    return any(map(is_of_mtp, template))


def _saved_with_mtp(path: str | Path) -> bool:
    return any(map(is_of_mtp, dist_checkpointing.load_tensors_metadata(str(path))))
