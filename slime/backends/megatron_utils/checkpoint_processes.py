"""The processes that write the shards of a rank: one that is killed fails the save.

megatron-core waits for all of them without a deadline, and looks at none: if the kernel kills one, as a rule
for want of memory, the run hangs.
"""

import multiprocessing as mp
import signal
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


def install() -> None:
    """Has checkpoints of this process written by `write_in_processes`."""
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write_in_processes)


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
    context = mp.get_context("fork")
    writers: list[tuple[ForkProcess, Connection]] = []
    for number, bucket in enumerate(buckets):
        receiver, sender = context.Pipe(duplex=False)
        options = {"use_msc": True} if use_msc else {}
        answer = _Answer(sender)
        process = context.Process(
            target=FileSystemWriterAsync.write_preloaded_data,
            args=(transforms, number, bucket, answer, answer, True),
            kwargs=options,
        )
        process.start()
        sender.close()
        writers.append((process, receiver))
    written = {}
    for number, (process, receiver) in enumerate(writers):
        written[number] = _answer_of(process, receiver, str(buckets[number][0]))
    failures = [outcome for outcome in written.values() if isinstance(outcome, Exception)]
    results.put(failures[0] if failures else written)


def _answer_of(process: ForkProcess, receiver: Connection, path: str) -> Any:
    """What a process has written, or its exception; also if it ended without a word."""
    wait([receiver, process.sentinel])
    try:
        return receiver.recv() if receiver.poll() else _unanswered(process, path)
    except EOFError:
        return _unanswered(process, path)
    finally:
        process.join()


def _unanswered(process: ForkProcess, path: str) -> RuntimeError:
    process.join()
    return RuntimeError(f"{path}: the process that wrote it {_end(process.exitcode or 0)}")


def _end(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit status {exit_code}"
