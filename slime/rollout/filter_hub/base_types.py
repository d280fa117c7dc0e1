"""What a dynamic filter says about a group, and the count of what it dropped."""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.config.generation import GenerationConfig
from slime.rollout.attempts import flatten
from slime.rollout.base_types import blame
from slime.rollout.trained import trained_part
from slime.rollout.ungraded import nothing_is_graded
from slime.utils.misc import load_function


@dataclass
class DynamicFilterOutput:
    """Whether to keep a group.

    ``keep_when_insufficient``: a group not worth keeping is still better than generating a new one.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Apply a filter; without one every group is kept, and a bare bool is wrapped.

    A group in which nothing could be graded is dropped before any filter sees it.

    Raises:
        TypeError: the filter decides nothing; taken for a no, its silence would empty every batch.
    """
    if len(args) > 1 and nothing_is_graded(args[1]):
        return DynamicFilterOutput(keep=False, reason="ungraded")
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    if output is None or inspect.isawaitable(output):
        raise TypeError(f"it returned {type(output).__name__}, expected a DynamicFilterOutput or a bool")
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(output))


def filtered(config: GenerationConfig, group: list[Any]) -> DynamicFilterOutput:
    """What ``--dynamic-sampling-filter-path`` says of a group; an error names function and samples.

    It is given what would be trained on: the rewards of an opponent are no signal.
    """
    path = config.rollout.dynamic_sampling_filter_path
    fn = load_function(path) if path else None
    with blame(fn or call_dynamic_filter, flatten(group)):
        return call_dynamic_filter(fn, config.flat, trained_part(config, group))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether the group goes.

    Args:
        remaining_batch_size: groups kept so far or still in flight, this one included.
        target_data_size: groups that the rollout needs.
    """
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        self._drops[reason or "unspecified"] += 1

    def collect(self) -> dict[str, int]:
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._drops.items()}
