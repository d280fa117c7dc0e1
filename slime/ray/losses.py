"""What a run may lose, and what it may go on after."""

from collections.abc import Iterator
from contextlib import contextmanager

from slime.ray.ending import cause
from slime.ray.engine_watch import EngineFailure
from slime.ray.process_watch import ProcessStopped
from slime.ray.waiting import ProcessDied

_LOSSES = (ProcessDied, ProcessStopped, EngineFailure)


class RanksLost(ProcessDied):
    """A rank ended or was stopped, and the others can do nothing without it."""


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
