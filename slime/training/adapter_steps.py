"""Optimizer steps of several adapters on one base, each of which trains on its own samples.

A step of the run is cut by adapters. Each part has micro-batches, a size and, of its adapter, an update of
its own: what it would have if its samples were all there are. Parts come one after the other, so that the
ranks agree which adapter is in place.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from slime.training.batch import ADAPTER_STEPS
from slime.utils.types import RolloutBatch


class Part(NamedTuple):
    """The micro-batches of one adapter in an optimizer step; all of them where adapters have no names.

    Attributes:
        step: number of the step in the rollout.
        adapter: a name; None where there are none.
        num_microbatches: on each rank.
        rollouts: over all ranks.
    """

    step: int
    adapter: str | None
    num_microbatches: int
    rollouts: int


def parts_of(batch: RolloutBatch) -> list[Part]:
    """The parts of all steps of a shard, in the order of its micro-batches."""
    counts, sizes = batch["num_microbatches"], batch["global_batch_sizes"]
    named = batch.get(ADAPTER_STEPS) or [(step, None) for step in range(len(counts))]
    return [
        Part(step, name, count, size) for (step, name), count, size in zip(named, counts, sizes, strict=True)
    ]


def steps_of(batch: RolloutBatch) -> Iterator[list[Part]]:
    """The parts of each step."""
    for _, parts in groupby(parts_of(batch), key=lambda part: part.step):
        yield list(parts)


def runs_of(batch: RolloutBatch) -> Iterator[tuple[str | None, list[int]]]:
    """(adapter, micro-batches of each part) of parts that follow one another and have one adapter."""
    for adapter, parts in groupby(parts_of(batch), key=lambda part: part.adapter):
        yield adapter, [part.num_microbatches for part in parts]


def num_steps(batch: RolloutBatch) -> int:
    """Optimizer steps of the rollout, of whatever number of parts."""
    return len({part.step for part in parts_of(batch)})


def metrics_of_step(parts: Sequence[Part], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of a step: its part's, or means over its rollouts beside ``adapter/<name>/<metric>``."""
    if parts[0].adapter is None:
        return dict(found[0])
    total = sum(part.rollouts for part in parts)
    means = {
        name: sum(part.rollouts * float(metrics[name]) for part, metrics in zip(parts, found, strict=True))
        / total
        for name in found[0]
        if all(name in metrics for metrics in found)
    }
    return means | {
        f"adapter/{part.adapter}/{name}": value
        for part, metrics in zip(parts, found, strict=True)
        for name, value in metrics.items()
    }
