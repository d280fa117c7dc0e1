"""A rollout under way, and what has become of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import ObjectRef

from slime.observability.spans import Span

if TYPE_CHECKING:  # needs libraries that the driver does without
    from slime.rollout.data_state import DataState


@dataclass(frozen=True)
class Generated:
    """What the rollout manager tells of a rollout beside its train shards.

    Attributes:
        warnings: what a user should be told of it.
        spans: of the manager and the samples, if they are collected.
        data_state: where the data is after it; None where nobody needs it.
        unsaved: why the position in the data could not be saved; None if it was, or is not.
    """

    metrics: dict[str, Any]
    warnings: list[str]
    spans: list[Span]
    data_state: "DataState | None"
    unsaved: str | None


class PendingRollout:
    """A rollout that the manager makes, or has made.

    Its shards are the driver's: they outlive the manager.

    Args:
        start: asks the manager for it; the first reference is to a `Generated`, the others are to the train
            shard of each data-parallel rank.
        finish: waits for the first one, and takes note of what it tells.

    Attributes:
        repeated: whether it is made a second time, because the first manager was lost.
    """

    def __init__(self, start: Callable[[], list[ObjectRef]], finish: Callable[[ObjectRef], None]) -> None:
        self._start, self._finish = start, finish
        self._refs: list[ObjectRef] | None = start()
        self._finished = self.repeated = False

    def lose(self) -> None:
        """Takes note that the manager has ended: what is not finished is asked for again with `result`."""
        if not self._finished:
            self._refs, self.repeated = None, True

    def result(self) -> Sequence[ObjectRef]:
        """Waits for the rollout, and returns the train shard of each data-parallel rank."""
        if self._refs is None:
            self._refs = self._start()
        if not self._finished:
            self._finish(self._refs[0])
            self._finished = True
        return self._refs[1:]


def begun(manager: Any, shards: int, rollout_id: int, updates_ahead: int) -> list[ObjectRef]:
    """Asks a manager for a rollout; references to what is told of it, and to its shards.

    All are returned and none is put into the store by the manager: they live as long as this process.
    """
    refs = manager.generate.options(num_returns=1 + shards).remote(rollout_id, updates_ahead)
    return list(refs) if shards else [refs]
