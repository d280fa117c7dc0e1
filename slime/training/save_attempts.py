"""How the saves of a run ended: one that finds a full disk need not end the run."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

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
