"""Several sources of prompts, and the order in which an epoch goes through them.

``--prompt-data`` names one path, or a YAML file that lists some::

    sources:
      - {name: math, path: "data/math/*.jsonl", weight: 2}
      - {name: code, path: "data/code.parquet@[:5000]", weight: 1}

Weights are shares: of three prompts two are from ``math``, whatever the sizes. An epoch has as many prompts
as there are in all; each source goes on in the next epoch where it was, and repeats nothing before all of it
was used. Without weights an epoch has each prompt once.
"""

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from slime.utils.data_files import DataError

_KEYS = {"name", "path", "weight"}


@dataclass(frozen=True)
class Source:
    """A source of prompts. ``name`` becomes the ``source_name`` of their metadata; None for a path alone."""

    path: str
    name: str | None = None
    weight: float | None = None


def find_sources(path: str) -> list[Source]:
    """The sources that a path means.

    Raises:
        DataError: a YAML file is not as above.
    """
    if Path(path).suffix not in (".yaml", ".yml"):
        return [Source(path)]
    entries = _entries(path)
    sources = [_source(f"{path}: source {number}", entry) for number, entry in enumerate(entries, 1)]
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{path}: {names.count(name)} sources have the name {name!r}, expected one")
    unweighted = [source.name for source in sources if source.weight is None]
    if 0 < len(unweighted) < len(sources):
        raise DataError(f"{path}: source {unweighted[0]!r} has no weight, expected one as the others have")
    return sources


def _entries(path: str) -> list[Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot read as YAML ({error})") from error
    entries = content.get("sources") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or len(content) > 1:
        raise DataError(f"{path}: expected one key, sources, with a list of name, path and perhaps weight")
    return entries


def _source(where: str, entry: Any) -> Source:
    if not isinstance(entry, dict) or not {"name", "path"} <= entry.keys() <= _KEYS:
        raise DataError(f"{where} is {entry!r:.80}, expected name, path and perhaps weight")
    for key in ("name", "path"):
        if not isinstance(entry[key], str) or not entry[key]:
            raise DataError(f"{where}: {key} is {entry[key]!r:.80}, expected text")
    weight = entry.get("weight")
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (number and math.isfinite(weight) and weight > 0):
        raise DataError(f"{where}: weight is {weight!r:.80}, expected a number above 0")
    if Path(entry["path"]).suffix in (".yaml", ".yml"):
        raise DataError(f"{where}: path {entry['path']} is a YAML file, expected data")
    return Source(entry["path"], entry["name"], weight)


def epoch_order(
    sizes: Sequence[int], weights: Sequence[float] | None, seed: int, epoch: int, shuffled: bool
) -> Sequence[int] | np.ndarray:
    """Positions, among the prompts of all sources one after the other, in the order of an epoch.

    It depends on the arguments alone. Not shuffled, every source is in its own order, and weighted ones are
    spread evenly.
    """
    total = sum(sizes)
    if weights is None:
        return _permuted(range(total), seed + epoch) if shuffled else range(total)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    quotas = _quotas(weights, total)
    picks = [
        start + _stream(size, f"{seed} {number}" if shuffled else None, epoch * quota, quota)
        for number, (size, start, quota) in enumerate(zip(sizes, starts, quotas, strict=True))
    ]
    together = np.concatenate(picks)
    if shuffled:
        return _permuted(together, seed + epoch)
    ranks = np.concatenate([(np.arange(quota) + 0.5) / max(quota, 1) for quota in quotas])
    return together[np.argsort(ranks, kind="stable")]


def _permuted(positions: Sequence[int] | np.ndarray, seed: int | str) -> Sequence[int]:
    order = array("Q", positions)
    random.Random(seed).shuffle(order)
    return order


def _quotas(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers with this sum, as near to the shares as they can be."""
    exact = [weight / sum(weights) * total for weight in weights]
    quotas = [math.floor(share) for share in exact]
    by_rest = sorted(range(len(weights)), key=lambda i: (quotas[i] - exact[i], i))
    for i in by_rest[: total - sum(quotas)]:
        quotas[i] += 1
    return quotas


def _stream(size: int, seed: str | None, first: int, count: int) -> np.ndarray:
    """``count`` positions in a source from its ``first`` on, of all its passes one after the other."""
    picks = [np.zeros(0, np.int64)]
    while count:
        turn, offset = divmod(first, size)
        order = range(size) if seed is None else _permuted(range(size), f"{seed} {turn}")
        picks.append(np.array(order[offset : offset + count], np.int64))
        first, count = first + len(picks[-1]), count - len(picks[-1])
    return np.concatenate(picks)
