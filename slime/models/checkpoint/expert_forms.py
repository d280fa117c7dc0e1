"""Experts of a layer in one tensor or one by one: of some families there are checkpoints of both forms.

Published ones of Qwen3.5 have [experts, rows, columns] in one tensor, gate over up; those in float8, and
those that ``transformers`` writes, have three matrices for each expert.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slime.models.families import FAMILIES
from slime.models.hf_config import HfConfig
from slime.models.rules import FusedGateUpRule

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Part(NamedTuple):
    """One expert's matrix in a tensor [experts, rows, columns]: the rows of part ``place`` of ``parts``."""

    stack: str
    expert: int
    place: int
    parts: int


def _layers(config: HfConfig) -> str | None:
    """The prefix of layers whose experts may be either way; None of a family with one form."""
    family = FAMILIES.get(config.get("model_type"))
    experts = family.weights.experts if family else None
    if family is None or experts is None or not experts.stacked:
        return None
    fused = isinstance(experts.of_expert["linear_fc1.weight"], FusedGateUpRule)
    return f"{family.weights.prefix.trunk}layers." if fused else None


def stacks_of(names: Iterable[str], config: HfConfig) -> dict[str, list[tuple[str, ...]]]:
    """Tensors of all experts of a layer that these names make up: for each expert the matrices in its rows.

    Raises:
        ValueError: a layer lacks a matrix of an expert.
    """
    prefix = _layers(config)
    if prefix is None:
        return {}
    pattern = re.compile(rf"({re.escape(prefix)}\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if match := pattern.fullmatch(name):
            found[match[1]][int(match[2])].add(match[3])
    stacks = {}
    for layer, experts in found.items():
        for number in range(max(experts) + 1):
            if lacking := sorted({"gate_proj", "up_proj", "down_proj"} - experts[number]):
                raise ValueError(f"no tensor {layer}.{number}.{lacking[0]}.weight")
        for stack, parts in _PARTS.items():
            stacks[f"{layer}.{stack}"] = [
                tuple(f"{layer}.{number}.{part}.weight" for part in parts) for number in sorted(experts)
            ]
    return stacks


def parts_of(shapes: Mapping[str, tuple[int, ...]], config: HfConfig) -> dict[str, Part]:
    """The matrices of single experts in tensors of these shapes, by the name that they have one by one."""
    prefix = _layers(config)
    if prefix is None:
        return {}
    pattern = re.compile(rf"({re.escape(prefix)}\d+\.mlp\.experts)\.({'|'.join(_PARTS)})")
    found: dict[str, Part] = {}
    for name, shape in shapes.items():
        if match := pattern.fullmatch(name):
            parts = _PARTS[match[2]]
            found |= {
                f"{match[1]}.{number}.{part}.weight": Part(name, number, place, len(parts))
                for number in range(shape[0])
                for place, part in enumerate(parts)
            }
    return found
