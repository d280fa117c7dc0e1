"""MTP layers in checkpoints, which not all checkpoints of a model have."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from slime.backends.megatron_utils.named_params import is_of_mtp

_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")


def require_mtp(template: Mapping[str, Any], path: str | Path) -> None:
    """Raises ValueError if a model has such layers and the checkpoint it goes on from has fewer.

    Args:
        template: sharded weights of one model chunk, or of several under their numbers.
    """
    if not (wanted := _mtp_layers(template)) or not (missing := wanted - _saved_mtp_layers(path)):
        return
    if missing == wanted:
        raise ValueError(
            f"checkpoint {path}: has no MTP layers (wanted: another one, or no --enable-mtp-training)"
        )
    raise ValueError(
        f"checkpoint {path}: has {len(wanted - missing)} MTP layers (wanted: another one, or "
        f"--mtp-num-layers {len(wanted - missing)})"
    )


def without_absent_mtp(template: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """What to load of a model's sharded weights: such layers only if ``path`` has all of them."""
    if _mtp_layers(template) <= _saved_mtp_layers(path):
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


def _mtp_layers(template: Mapping[str, Any]) -> set[int]:
    """Returns the numbers of the MTP layers, in one chunk or several."""
    if _of_chunks(template):
        return set().union(*(_mtp_layers(chunk) for chunk in template.values()))
    return _numbers(template)


def _saved_mtp_layers(path: str | Path) -> set[int]:
    return _numbers(dist_checkpointing.load_tensors_metadata(str(path)))


def _numbers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := _LAYER.match(name))}
