"""The small files that megatron-core writes on rank 0 alone: without room for one of them the save fails.

Where one fails, megatron-core raises on rank 0, and the other ranks wait for it in the next collective.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from slime.training.checkpoint_errors import on_every_rank, raise_first
from slime.utils.plain_file import is_write_error

_WRITES = (
    (TorchCommonSaveStrategy, "save_common"),
    (FileSystemWriterAsync, "finish"),
    (serialization, "save_config"),
)


class FirstRankWrites:
    """Failures of these writes in one save."""

    def __init__(self) -> None:
        self._failures: list[Exception] = []

    def forget(self) -> None:
        """Begins another save."""
        self._failures.clear()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps what fails in the block, which goes on as if it had been written."""
        own = [getattr(owner, name) for owner, name in _WRITES]
        for (owner, name), write in zip(_WRITES, own, strict=True):
            setattr(owner, name, self._keeping(write))
        try:
            yield
        finally:
            for (owner, name), write in zip(_WRITES, own, strict=True):
                setattr(owner, name, write)

    def _keeping(self, write: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                write(*args, **kwargs)
            except (OSError, RuntimeError) as error:
                if not is_write_error(error):
                    raise
                self._failures.append(error)

        return run

    def require(self) -> None:
        """Collective. Raises on every rank if one of them failed.

        Raises:
            RankWriteError: says which.
        """
        failures = list(self._failures)
        self.forget()
        on_every_rank(lambda: raise_first(failures))
