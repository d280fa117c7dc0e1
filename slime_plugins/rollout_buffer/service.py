"""One queue, and the generator that fills it."""

import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson

from slime_plugins.rollout_buffer.buffer_queue import BufferQueue
from slime_plugins.rollout_buffer.commits import Closed, Commits
from slime_plugins.rollout_buffer.generator import generator_of, outside
from slime_plugins.rollout_buffer.pool import ExperiencePool, Query
from slime_plugins.rollout_buffer.runs import ENDED, NONE, RUNNING, STOPPED, Run
from slime_plugins.rollout_buffer.schema import hold
from slime_plugins.rollout_buffer.store import Item, Store
from slime_plugins.rollout_buffer.trajectory import BufferResponse, Fetch, Start

logger = logging.getLogger(__name__)
MAX_WAITING = 1_000_000
NOTE_AGAIN_S = 1.0
_OF_SERVICE = {"resume", "run", "holder"}
"""Fields of a start that no generator is told."""
HOOKS = ("is_valid_group", "transform_group", "get_group_data_meta_info")


class RolloutBuffer:
    """One queue, and the generator that fills it.

    Args:
        group_size: of a file without groups, until a generator is started.
        task_type: likewise.
        file: where everything is kept; None for a place that ends with the process.
        max_waiting: trajectories that nobody has for good, before no more groups are begun.
        keep: groups that were given out for good and keep their trajectories; None for all.
        api_key: that a generator is told, to bring it to the service and to the engines.
    """

    def __init__(
        self,
        group_size: int = 16,
        task_type: str = "math",
        file: Path | str | None = None,
        max_waiting: int = MAX_WAITING,
        keep: int | None = None,
        api_key: str | None = None,
    ) -> None:
        self._api_key = api_key
        if file is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rollout-buffer-")
            file = Path(self._folder.name) / "buffer.sqlite"
        self._held = hold(file)
        self._store = Store(file, max_waiting, keep)
        self._pool, self._pool_lock = ExperiencePool(file), threading.Lock()
        self._start: Start | None = None
        self._running: threading.Thread | None = None
        self._starting = threading.Lock()
        run = self._store.run() or self._store.begin_run(task_type, group_size)
        # What a run wants of programs elsewhere ended with the process as well, and a start says it again.
        if run.generator == RUNNING or (run.generator, run.task_type) == (ENDED, outside.TASK_TYPE):
            self._store.set_generator(run.id, STOPPED)
        self.queue = self._queue(run, None if run.generator == NONE else generator_of(run.task_type))
        self._commits = Commits(self._store)

    def close(self) -> None:
        """Closes the file, after what waits to be written."""
        self._commits.close()
        self._store.close()
        self._pool.close()
        os.close(self._held)

    def _queue(self, run: Run, module: ModuleType | None) -> BufferQueue:
        valid, transform, meta_of = (getattr(module, hook, None) for hook in HOOKS)
        return BufferQueue(run.group_size, valid, transform, meta_of, self._store)

    def write(self, item: Item) -> "Future[bool]":
        """Whether it is new, once it is on the disk."""
        return self._commits.submit(lambda: self.queue.append(item))

    def fetch(self, asked: Fetch) -> "Future[bytes | None]":
        """The answer that gives out groups, if there are any."""
        return self._commits.submit(lambda: self._fetched(asked))

    def _fetched(self, asked: Fetch) -> bytes | None:
        """Encoded before the groups are given: what a generator's hooks made of them may not be JSON."""
        groups, meta_info = self.queue.take(asked.max_groups, asked.lease, asked.lease_s)
        if not groups:
            return None
        items = [item for group in groups.values() for item in group]
        answer = BufferResponse(success=True, data={"data": items, "meta_info": meta_info})
        return orjson.dumps(vars(answer), option=orjson.OPT_SERIALIZE_NUMPY)

    def acknowledge(self, leases: Sequence[str]) -> "Future[None]":
        return self._commits.submit(lambda: self._store.acknowledge(leases))

    def status(self) -> "Future[tuple[Run, dict[str, int]]]":
        """The run, and how many groups there are of each state."""
        return self._commits.submit(lambda: (self._store.current(), self._store.counts()))

    @property
    def asked(self) -> dict[str, Any] | None:
        """What the run wants of whoever makes trajectories, without its key; None if none has started."""
        return None if self._start is None else self._start.model_dump(exclude={"api_key", *_OF_SERVICE})

    def query(self, query: Query) -> list[dict[str, Any]]:
        with self._pool_lock:
            return self._pool.find(query)

    def start(self, start: Start) -> None:
        """Runs the generator in the background, on an empty queue or on that of an earlier start.

        Another start of the same run goes on with its queue, and with the generator while that is at work.

        Raises:
            ValueError: no generator makes this type of task, or the queue is of another one.
            RuntimeError: another one is at work.
        """
        with self._starting:
            self._start_alone(start)

    def _start_alone(self, start: Start) -> None:
        if self._running is not None and self._running.is_alive():
            if start == self._start or self._is_again(start):
                self._commits.submit(lambda: self._end_leases(start)).result()
                self._start = start
                return
            raise RuntimeError(f"a generator of {self._store_run().task_type} is at work")
        module = generator_of(start.task_type)
        start = start.model_copy(update={"resume": start.resume or self._is_again(start)})
        data = start.model_dump(exclude=_OF_SERVICE)
        if self._api_key is not None:
            data.setdefault("api_key", self._api_key)
        run = self._commits.submit(lambda: self._begun(start, module, data)).result()
        self._start = start
        self._running = threading.Thread(target=self._run, args=(module, data, run.id), daemon=True)
        self._running.start()

    def _is_again(self, start: Start) -> bool:
        """Whether the run that has started before does so once more, as after the loss of its manager.

        The file knows, so that it is the same after a loss of this process.
        """
        return start.run is not None and self._store_run().owner == start.run

    def _end_leases(self, start: Start) -> None:
        """Ends those of whoever fetched for the run before: it is gone, and acknowledges nothing any more."""
        if start.run is not None:
            self._store.end_leases(start.run, start.holder)

    def _store_run(self) -> Run:
        return self._commits.submit(self._store.current).result()

    def _begun(self, start: Start, module: ModuleType, data: dict[str, Any]) -> Run:
        if start.resume:
            run = self._store.current()
            if (run.task_type, run.group_size) != (start.task_type, start.num_repeat_per_sample):
                raise ValueError(
                    f"resume: the queue is of {run.task_type} in groups of {run.group_size} (wanted: "
                    f"{start.task_type} in groups of {start.num_repeat_per_sample}, or no resume)"
                )
            self._store.set_generator(run.id, RUNNING)
            self._end_leases(start)
            data["skip_uids"] = self._store.uids()
        else:
            size = start.num_repeat_per_sample
            run = self._store.begin_run(start.task_type, size, RUNNING, start.run)
        self.queue = self._queue(run, module)
        return run

    def _run(self, module: ModuleType, data: dict[str, Any], run: int) -> None:
        state = ENDED
        try:
            module.run_rollout(data)
        except BaseException as error:  # the user's code, which may exit as well; whoever fetches is told
            logger.exception("generator of %s failed", data["task_type"])
            state = f"{type(error).__name__}: {error}"
        while not self._noted(run, state):
            time.sleep(NOTE_AGAIN_S)

    def _noted(self, run: int, state: str) -> bool:
        """Whether it is on the disk: whoever fetches waits for a generator of which it is not."""
        try:
            self._commits.submit(lambda: self._store.set_generator(run, state)).result()
        except Closed:
            pass
        except sqlite3.OperationalError:  # a full disk, for instance; it was logged
            return False
        return True
