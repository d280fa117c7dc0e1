"""Who writes the saves of a trainer, and how they ended: one that finds a full disk need not end the run."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist

from slime.config.checkpoints import CheckpointConfig
from slime.training.checkpoint_errors import CheckpointError, explained
from slime.utils.checkpoint_record import KEPT_SNAPSHOTS

Outcome = str | None
"""Why a save failed; None of one that is complete."""


def of_snapshots(flags: CheckpointConfig, directory: str) -> CheckpointConfig:
    """How snapshots in the memory of a host are written: as checkpoints, with all that ranks go on from."""
    own = replace(flags, save=directory, keep_checkpoints=KEPT_SNAPSHOTS, async_save=False)
    return replace(own, no_save_optim=None, no_save_rng=None)


class SaveAttempts:
    """Notes the outcome of each save below ``root``, the same on every rank."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._outcomes: list[Outcome] = []

    @contextmanager
    def attempt(self, temporary: Path) -> Iterator[None]:
        """Collective. A save that every rank knows to have failed is noted, and what it wrote removed.

        Args:
            temporary: where it writes.

        Raises:
            CheckpointError: this rank failed, and others may wait for it.
        """
        try:
            with explained(self._root, "written", "space there, and leave to write"):
                yield
        except CheckpointError as error:
            if not error.everywhere:
                raise
            self._outcomes.append(str(error))
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)

    def complete(self) -> None:
        """Notes a save that has become the latest."""
        self._outcomes.append(None)

    def take(self) -> list[Outcome]:
        """The outcomes that are known since the last call, in the order of the saves."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


class Writer(Protocol):
    """Writes saves below one directory."""

    attempts: SaveAttempts

    def finish(self) -> None:
        """Waits for the save that is under way."""

    def poll(self) -> None:
        """Completes the save that is under way, if it is written."""


W = TypeVar("W", bound=Writer)


class Writers(Generic[W]):
    """What writes the checkpoints of a trainer, and what its snapshots into a host's memory.

    Args:
        flags: of checkpoints.
        make: a writer from such flags, or those of snapshots; collective. Of snapshots it is made with the
            first one in a directory.
    """

    def __init__(self, flags: CheckpointConfig, make: Callable[[CheckpointConfig], W]) -> None:
        self._flags, self._make = flags, make
        self.checkpoints = make(flags)
        self._snapshots: dict[str, W] = {}

    def save(self, memory: str | None, wait: bool, begin: Callable[[W], None]) -> list[Outcome]:
        """Collective. Begins a save, and returns the outcomes that are known then of those in its place.

        Args:
            memory: the directory of a snapshot; None for a checkpoint.
            wait: until it is written.
        """
        writer = self.checkpoints if memory is None else self._of_snapshots(memory)
        begin(writer)
        if wait:
            writer.finish()
        return writer.attempts.take()

    def _of_snapshots(self, directory: str) -> W:
        if directory not in self._snapshots:
            self._snapshots[directory] = self._make(of_snapshots(self._flags, directory))
        return self._snapshots[directory]
