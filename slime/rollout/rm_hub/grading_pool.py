"""Graders in killable processes: ``await grade_in_process("my_task.grading.equal", response, label)``.

What loops for ever, takes all memory, forks or exits there costs its own sample and nothing else. A reward of
your own may call its grader so: a plain function of plain JSON values.
"""

import asyncio
import atexit
import os
import queue
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from slime.rollout.rm_hub.grading_process import GradingProcess

GRADING_LIMIT_S = 10.0
_MOST_PROCESSES = 4
_REMEMBERED = 4096
_NOTHING = object()


async def grade_in_process(function: str, *args: Any, remember: bool = False) -> Any:
    """What a function says, found by its dotted path, within ``GRADING_LIMIT_S`` seconds.

    Args:
        remember: it says the same of the same arguments, all of them text: ask once.

    Raises:
        GradingFailed: it hung, raised or died on these arguments.
        GraderError: it cannot be imported, or says that the label is at fault.
    """
    pool = _pool()
    call = partial(pool.call, function, *args, remember=remember)
    return await asyncio.get_running_loop().run_in_executor(pool.threads, call)


def grade_and_wait(function: str, *args: Any) -> Any:
    """Grades from plain code, which it blocks."""
    return _pool().call(function, *args)


@cache
def _pool() -> "GradingPool":
    pool = GradingPool(size=min(_MOST_PROCESSES, os.cpu_count() or 1))
    atexit.register(pool.close)
    return pool


class GradingPool:
    """A few processes, each started when it is first needed, each used by one thread at a time.

    Attributes:
        threads: one for each process. Not those that all of asyncio shares: graders that hang would keep
            others waiting.
    """

    def __init__(self, size: int, limit_s: float = GRADING_LIMIT_S) -> None:
        self._processes = [GradingProcess(limit_s) for _ in range(size)]
        # Last in, first out: a started process is used before another is started.
        self._idle: queue.LifoQueue[GradingProcess] = queue.LifoQueue()
        for process in self._processes:
            self._idle.put(process)
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="slime-grading")
        self._verdicts: OrderedDict[tuple[str, ...], Any] = OrderedDict()
        self._writing = threading.Lock()

    @property
    def pids(self) -> list[int]:
        """The process ids of the graders that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    def call(self, function: str, *args: Any, remember: bool = False) -> Any:
        """See ``grade_in_process``. Blocks."""
        key = (function, *args)
        # Here, where a call waits for its turn no longer: the answers of a group come all at once.
        if remember and (verdict := self._verdicts.get(key, _NOTHING)) is not _NOTHING:
            return verdict
        process = self._idle.get()
        try:
            verdict = process.call(function, *args)
        finally:
            self._idle.put(process)
        if remember:
            with self._writing:
                self._verdicts[key] = verdict
                if len(self._verdicts) > _REMEMBERED:
                    self._verdicts.popitem(last=False)
        return verdict

    def close(self) -> None:
        """Kill the processes."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.stop()
