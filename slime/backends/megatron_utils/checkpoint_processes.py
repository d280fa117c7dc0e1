"""The processes that write the shards of a rank: one that is killed, or stays stopped, fails the save.

megatron-core waits for all of them without a deadline, and looks at none: if the kernel kills one, as a rule
for want of memory, the run hangs.
"""

import multiprocessing as mp
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from slime.processes.stopped import STOPPED_LIMIT_S, StopClock, is_stopped, with_descendants
from slime.processes.supervisor import PR_SET_PDEATHSIG, prctl

_LOOK_S = 1.0
_LAST_WORDS_S = 5.0  # to read what a process that has ended had said; what it has started may hold the pipe
Results = queue.SimpleQueue[Any]
Writer = tuple[ForkProcess, Connection, str]
"""A process that writes, where it answers, and its file."""


def install() -> None:
    """Has checkpoints of this process written by `write_in_processes`."""
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write_in_processes)
    if filesystem_async._results_queue is None:
        # megatron-core starts a process for it, which imports all that this one has, at the first save of
        # every rank, and for whose answers nothing has a deadline.
        filesystem_async._results_queue = Results()


class _Answer:
    """Stands for megatron-core's two queues in a process that writes: its result, and that it is done."""

    def __init__(self, sender: Connection) -> None:
        self._sender = sender

    def put(self, result: tuple[int, Any]) -> None:
        self._sender.send(result[1])

    def get(self) -> None:
        pass

    def task_done(self) -> None:
        pass


@filesystem_async._disable_gc()
def write_in_processes(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: Any
) -> None:
    """Writes each bucket in a process of its own, in place of ``write_preloaded_data_multiproc``.

    Args:
        results: gets what was written by the number of the bucket, or the first exception.
    """
    writers = [_started(transforms, use_msc, number, bucket) for number, bucket in enumerate(buckets)]
    written = {}
    for number, writer in enumerate(writers):
        written[number] = writer if isinstance(writer, Exception) else answer_of(*writer)
    failures = [outcome for outcome in written.values() if isinstance(outcome, Exception)]
    results.put(failures[0] if failures else written)


def _started(transforms: list[Any], use_msc: bool, number: int, bucket: Any) -> Writer | RuntimeError:
    """A process that writes a bucket, or why there is none: other ranks wait for what this one has to say."""
    context, path = mp.get_context("fork"), str(bucket[0])
    try:
        receiver, sender = context.Pipe(duplex=False)
        answer = _Answer(sender)
        process = context.Process(
            target=_write,
            args=(os.getpid(), transforms, number, bucket, answer, answer, True),
            kwargs={"use_msc": True} if use_msc else {},
        )
        process.start()
    except OSError as error:  # no memory, no process or no file is left
        return RuntimeError(f"{path}: no process could be started to write it ({error.strerror})")
    sender.close()
    return process, receiver, path


def _write(parent: int, *args: Any, **kwargs: Any) -> None:
    """Writes a bucket as long as the process that wants it lives: another save may need the memory."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        FileSystemWriterAsync.write_preloaded_data(*args, **kwargs)


def answer_of(process: ForkProcess, receiver: Connection, path: str) -> Any:
    """What a process has written, or its exception; also if it ended without a word, or in the middle of one.

    A thread reads it: a pipe holds 64 KiB, and a process that is stopped when it has sent so much of a longer
    answer is read from for ever.
    """
    answers = Results()
    reader = threading.Thread(target=_read, args=(receiver, answers), name="answer of a writer", daemon=True)
    reader.start()
    was_stopped = _waited_for(process, partial(_has_ended, reader))
    reader.join(_LAST_WORDS_S)
    was_stopped = _waited_for(process, partial(_has_ended, process)) or was_stopped
    try:
        return answers.get_nowait()
    except queue.Empty:
        return _unanswered(process, path, was_stopped)


def _read(receiver: Connection, answers: Results) -> None:
    with suppress(EOFError, OSError):  # OSError: it was killed in the middle of what it said
        try:
            answers.put(receiver.recv())
        except pickle.UnpicklingError as error:
            answers.put(error)


def _has_ended(other: threading.Thread | ForkProcess, seconds: float) -> bool:
    """Whether it ends within so many seconds."""
    other.join(seconds)
    return not other.is_alive()


def _waited_for(process: ForkProcess, is_over: Callable[[float], bool]) -> bool:
    """Waits until it is over, or the process has ended.

    Returns:
        Whether it stayed stopped (SIGSTOP), and was killed.
    """
    clock, pid = StopClock(), process.pid or 0
    while not is_over(_LOOK_S) and process.is_alive():
        if clock.overdue([pid] if is_stopped(pid) else []):
            _kill_all(pid)
            return True
    return False


def _kill_all(root: int) -> None:
    for pid in with_descendants(root):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _unanswered(process: ForkProcess, path: str, was_stopped: bool) -> RuntimeError:
    process.join()
    if was_stopped:
        end = f"was stopped (SIGSTOP) for {STOPPED_LIMIT_S:g} s, and killed"
    else:
        end = _end(process.exitcode or 0)
    return RuntimeError(f"{path}: the process that wrote it {end}")


def _end(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit status {exit_code}"
