"""What begins with a start of a generator, as the file of the rollout buffer says it."""

from dataclasses import dataclass

NONE, RUNNING, ENDED, STOPPED = "none", "running", "ended", "stopped"
"""What a generator may be, else it is what it failed of. Stopped: it ended with the service's process."""


@dataclass(frozen=True)
class Run:
    """What begins with a start of a generator.

    Attributes:
        generator: its state, or what it failed of.
        waiting: trajectories that nobody has for good.
        owner: the training run that started it, of whose starts all but the first go on with its groups.
    """

    id: int
    task_type: str
    group_size: int
    generator: str
    waiting: int
    owner: str | None

    @property
    def failure(self) -> str | None:
        """What ended the generator, if it did not end by itself."""
        if self.generator in (NONE, RUNNING, ENDED):
            return None
        stopped = "it ended with the service's process (wanted: another start, with resume)"
        return stopped if self.generator == STOPPED else self.generator
