"""A process that writes shards and ends without a word fails the save, which names its file."""

import errno
import os
import queue
import signal
import struct
from multiprocessing.connection import Connection

import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from slime.backends.megatron_utils import checkpoint_processes
from slime.backends.megatron_utils.checkpoint_processes import write_in_processes
from slime.processes.stopped import StopClock

BUCKETS = [("a.distcp", "a", ([], [])), ("b.distcp", "b", ([], []))]


@pytest.fixture
def write(monkeypatch):
    """``write(end)``: what becomes of two buckets if ``end()`` is called where the second one is written."""

    def outcome(end):
        def write_bucket(transforms, number, bucket, results, count, fsync):
            if number == 1:
                end()
            results.put((number, [bucket[0]]))
            count.get()
            count.task_done()

        monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write_bucket))
        results = queue.SimpleQueue()
        write_in_processes([], False, 0, BUCKETS, results)
        return results.get(timeout=1)

    return outcome


def test_what_was_written_is_told_by_bucket(write):
    assert write(lambda: None) == {0: ["a.distcp"], 1: ["b.distcp"]}


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(3), "ended with exit status 3"),
    ],
)
def test_one_that_is_killed_fails_the_save(write, end, how):
    assert str(write(end)) == f"b.distcp: the process that wrote it {how}"


def test_one_that_stays_stopped_is_killed_and_fails_the_save(write, monkeypatch):
    monkeypatch.setattr(checkpoint_processes, "_LOOK_S", 0.01)
    monkeypatch.setattr(StopClock.overdue, "__defaults__", (0.05,))
    why = "was stopped (SIGSTOP) for 15 s, and killed"
    stopped = write(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    assert str(stopped) == f"b.distcp: the process that wrote it {why}"


def test_one_that_cannot_be_started_fails_the_save(write, monkeypatch):
    def fork():
        if ended := forks.pop():
            raise ended
        return real()

    real, forks = os.fork, [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), None]
    monkeypatch.setattr(os, "fork", fork)
    why = "no process could be started to write it (Resource temporarily unavailable)"
    assert str(write(lambda: None)) == f"b.distcp: {why}"


def test_one_that_is_killed_in_the_middle_of_its_answer_fails_the_save(write, monkeypatch):
    def cut(sender, result):
        sender._send(struct.pack("!i", 100) + b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Connection, "send", cut)
    assert str(write(lambda: None)) == "a.distcp: the process that wrote it was killed by SIGKILL"


def test_an_exception_is_told(tmp_path):
    results = queue.SimpleQueue()
    write_in_processes([], False, 0, [(str(tmp_path / "none/a.distcp"), "a", ([], []))], results)
    assert isinstance(results.get(timeout=1), FileNotFoundError)


def test_files_are_written(tmp_path):
    results = queue.SimpleQueue()
    write_in_processes([], False, 0, [(str(tmp_path / "a.distcp"), "a", ([], []))], results)
    assert results.get(timeout=1) == {0: []} and (tmp_path / "a.distcp").read_bytes() == b""
