"""``--record-memory-history``: where everything on a trainer's GPU was allocated.

https://pytorch.org/memory_viz shows a snapshot.
"""

import logging
import time
from pathlib import Path
from typing import Any

import torch

from slime.config.profiling import ProfilingConfig

logger = logging.getLogger(__name__)

_LONGEST = 1_000_000  # allocations, the last ones


class MemoryHistory:
    """The record of one rank's GPU, from when it is made.

    Where memory runs out a snapshot is written before the error is raised.

    Args:
        name: begins the names of snapshots; another one on each rank.
    """

    def __init__(self, config: ProfilingConfig, name: str) -> None:
        self._config, self._name, self._recording = config, name, config.record_memory_history
        if self._recording:
            torch.cuda.memory._record_memory_history(max_entries=_LONGEST, stacks="python")
            torch._C._cuda_attach_out_of_memory_observer(self._on_out_of_memory)  # type: ignore[attr-defined]

    def after(self, rollout_id: int) -> None:
        """Writes the snapshot and ends the record, if this rollout is the last one of it.

        Raises:
            OSError: the snapshot cannot be written; the error names its file.
        """
        if self._recording and rollout_id + 1 == self._config.memory_snapshot_num_steps:
            self._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False

    def _on_out_of_memory(self, device: int, *sizes: Any) -> None:
        try:
            self._snapshot()
        except OSError as error:  # the memory that is missing is the cause to tell
            logger.error("no snapshot of the memory: %s", error)

    def _snapshot(self) -> None:
        config = self._config
        directory = Path(config.memory_snapshot_dir)
        path = directory / f"{self._name}_{int(time.time())}_{config.memory_snapshot_path}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        logger.info("snapshot of the memory: %s", path)
