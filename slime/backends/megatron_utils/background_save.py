"""``--async-save``: the process that writes a rank's shards while training goes on.

megatron-core waits for it without a deadline, and is told of the end by a further process, which a rank would
wait for as well.
"""

import threading
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    AsyncRequest,
    TemporalAsyncCaller,
)

from slime.backends.megatron_utils.checkpoint_processes import Results, answer_of


class BackgroundSaves(AsyncCallsQueue):
    """The saves that are being written, each by a process of its own.

    Args:
        finish: what is left to do of each on this rank when it is written; called in a thread.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish

    def _get_async_caller(self) -> "WatchedProcess":
        return WatchedProcess(self._finish)


class _Sender:
    """Stands for the queue of results in the process that writes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, outcome: Any) -> None:
        self._connection.send(outcome)


class WatchedProcess(TemporalAsyncCaller):  # type: ignore[misc]
    """Writes the shards of this rank; the save fails if it is killed, or stays stopped.

    A thread watches it, since a training step may take longer than it is forgiven to be stopped.

    Args:
        finish: called in that thread when all is written.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish = finish
        self.process: Any = None
        self._watcher: threading.Thread | None = None
        self._results: Results | None = None
        self._outcome: Any = None

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Starts to write; no process if this rank has nothing to write."""
        if async_req.async_fn is None:
            self._begin(self._finish)
            return
        rank, buckets, self._results = async_req.async_fn_args
        directory = str(Path(buckets[0][0]).parent)
        receiver, sender = get_context("fork").Pipe(duplex=False)
        try:
            super().schedule_async_call(async_req._replace(async_fn_args=(rank, buckets, _Sender(sender))))
        except OSError as error:  # no memory or no process is left, on this rank
            self._outcome = RuntimeError(
                f"{directory}: no process could be started to write it ({error.strerror})"
            )
            return
        finally:
            sender.close()
        self._begin(self._watch, receiver, directory)

    def _begin(self, what: Callable[..., None], *arguments: Any) -> None:
        self._watcher = threading.Thread(target=what, args=arguments, name="background save", daemon=True)
        self._watcher.start()

    def _watch(self, receiver: Connection, directory: str) -> None:
        self._outcome = answer_of(self.process, receiver, directory)
        if not isinstance(self._outcome, Exception):
            self._finish()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Collective. Whether it has ended on every rank."""
        if blocking and self._watcher is not None:
            self._watcher.join()
        writes = self._watcher is not None and self._watcher.is_alive()
        done = not writes if no_dist else bool(self.sync_all_async_calls(int(writes)))
        if done:
            self._tell()
        return done

    def _tell(self) -> None:
        """Puts the outcome where megatron-core looks for it next."""
        if self._results is not None:
            self._results.put(self._outcome)
            self._results = None
