"""What a run may lose, and what it may go on after."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from slime.ray.ending import cause
from slime.ray.engine_watch import EngineFailure
from slime.ray.process_watch import ProcessStopped
from slime.ray.waiting import ProcessDied
from slime.weight_sync.broken import GROUP_BROKE, of_broken_group

# As the C library and Python say it.
_STARVED = re.compile(r"too many open files|cannot allocate memory|can't start new thread|bad_alloc", re.I)
# Whose connections are others than those between ranks.
_OF_OTHERS = GROUP_BROKE, "engine http", "--update-weight-disk-dir"
_LOSSES = (ProcessDied, ProcessStopped, EngineFailure)


class RanksLost(ProcessDied):
    """A rank ended, was stopped or cut off, and the others can do nothing without it."""


class RankStarved(RuntimeError):
    """A rank's process may not have more of what its machine has."""


class RolloutSideLost(RuntimeError):
    """The rollout manager ended, or was stopped, or has no engine left; with it engines and routers go."""


class UpdateFailed(RuntimeError):
    """A weight update failed again and again, each time for want of an engine."""


@contextmanager
def losses_named(may_restart: bool, *more: type[Exception]) -> Iterator[None]:
    """Raises what another rollout manager could go on after as `RolloutSideLost`, if another one may start.

    Args:
        more: errors that are a loss, too.
    """
    try:
        yield
    except Exception as error:
        if not may_restart or not isinstance(error, (*_LOSSES, *more)):
            raise
        raise RolloutSideLost(cause(error)) from error


@contextmanager
def lost_ranks_named(what: str) -> Iterator[None]:
    """Raises as `RanksLost` that a rank has ended, or that ranks have lost their connections to each other.

    Connections to engines are no such loss: an update begins again without them. Nor are those to a disk.

    Raises:
        RankStarved: a rank has no descriptors, threads or memory left for what it does.
    """
    try:
        yield
    except ProcessDied as error:
        raise RanksLost(str(error)) from error
    except ray.exceptions.RayTaskError as error:
        if any(word in str(error) for word in _OF_OTHERS):
            raise
        if of_broken_group(error.cause):
            told = "ranks have lost their connections to each other"
            raise RanksLost(f"{what}: {told}: {cause(error)}") from error
        if _STARVED.search(str(error.cause)):
            raise RankStarved(
                f"{what}: a rank lacks descriptors, threads or memory: {cause(error)}"
            ) from error
        raise
