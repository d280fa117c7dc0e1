"""What a run may lose, and what it may go on after."""

from slime.ray.waiting import ProcessDied


class RanksLost(ProcessDied):
    """A rank ended or was stopped, and the others can do nothing without it."""


class RolloutSideLost(RuntimeError):
    """The rollout manager ended, or was stopped, or has no engine left; with it engines and routers go."""


class UpdateFailed(RuntimeError):
    """A weight update failed again and again, each time for want of an engine."""
