"""Changes of a store that wait at the same time, committed together: one flush to the disk for all."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.store import Store

logger = logging.getLogger(__name__)
MAX_AT_ONCE = 128
T = TypeVar("T")


class Closed(RuntimeError):
    """Nothing is written any more."""


class Commits:
    """The only thread that uses a store.

    A future is done once its change is on the disk. A change that raises is undone alone, and ends nothing
    else, whatever it raises.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._closed, self._lock = store, False, threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="rollout-buffer-commits", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Has the change made.

        Raises:
            Closed: it is.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise Closed("the file of the rollout buffer is closed")
            self._waiting.put((work, future))
        return future

    def close(self) -> None:
        """Ends the thread after what waits."""
        with self._lock:
            self._closed = True
            self._waiting.put(None)
        self._thread.join()

    def _serve(self) -> None:
        more = True
        while more:
            batch = [self._waiting.get()]
            while len(batch) < MAX_AT_ONCE and not self._waiting.empty():
                batch.append(self._waiting.get())
            more = None not in batch
            self._commit([job for job in batch if job is not None])

    def _commit(self, batch: list[tuple[Callable[[], Any], Future[Any]]]) -> None:
        batch = [(work, future) for work, future in batch if future.set_running_or_notify_cancel()]
        try:
            with self._store.transaction():
                outcomes = [self._outcome(work) for work, _ in batch]
        except Exception as error:  # of SQLite, a full disk for instance: whoever waits is told
            logger.exception("the file of the rollout buffer was not written")
            outcomes = [(None, error) for _ in batch]
        for (_, future), (result, failure) in zip(batch, outcomes, strict=True):
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)

    def _outcome(self, work: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            with self._store.transaction():
                return work(), None
        except BaseException as error:  # handed to whoever waits for it
            failure = error if isinstance(error, Exception) else RuntimeError(f"ended by {error!r}")
            if not self._store.in_transaction:  # SQLite has undone all of it, as on a full disk
                raise failure from None
            return None, failure
