"""A process that writes shards and ends without a word fails the save, which names its file."""

import errno
import multiprocessing as mp
import os
import queue
import signal
import struct
from multiprocessing.connection import Connection

import psutil
import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from slime.backends.megatron_utils import checkpoint_processes
from slime.backends.megatron_utils.checkpoint_processes import answer_of, write_in_processes
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
    why = "was stopped (SIGSTOP) for 6 s, and killed"
    stopped = write(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    assert str(stopped) == f"b.distcp: the process that wrote it {why}"


@pytest.mark.parametrize("sent", ["half of a long answer", "all of it"])
def test_one_that_stays_stopped_when_it_has_begun_to_answer_is_killed(write, monkeypatch, sent):
    """Whoever reads such an answer would never be done, and one that has answered would never end."""

    def stop_within(sender, result):
        if sent == "all of it":
            real(sender, result)
        else:
            sender._send(struct.pack("!i", 10**6) + bytes(10**5))
        os.kill(os.getpid(), signal.SIGSTOP)

    real = Connection.send
    monkeypatch.setattr(checkpoint_processes, "_LOOK_S", 0.01)
    monkeypatch.setattr(StopClock.overdue, "__defaults__", (0.05,))
    monkeypatch.setattr(Connection, "send", stop_within)
    found = write(lambda: None)
    if sent == "all of it":
        assert found == {0: ["a.distcp"], 1: ["b.distcp"]}
    else:
        assert str(found) == "a.distcp: the process that wrote it was stopped (SIGSTOP) for 6 s, and killed"


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


def test_writers_end_with_the_process_that_wants_them(monkeypatch):
    """They hold its sentinel open, and a killed one's save is over."""

    def write_bucket(*_):
        pids.send(os.getpid())
        signal.pause()

    monkeypatch.setattr(checkpoint_processes, "_LOOK_S", 0.01)
    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write_bucket))
    context = mp.get_context("fork")
    (told, pids), (receiver, _sender) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    process = context.Process(target=write_in_processes, args=([], False, 0, BUCKETS, None))
    process.start()
    writers = [psutil.Process(told.recv()) for _ in BUCKETS]
    process.kill()
    assert str(answer_of(process, receiver, "it")) == "it: the process that wrote it was killed by SIGKILL"
    assert not psutil.wait_procs(writers, timeout=30)[1]


def test_what_a_stopped_process_has_started_is_killed_with_it(monkeypatch):
    def start_and_stop():
        child = context.Process(target=signal.pause)
        child.start()
        pids.send(child.pid)
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(checkpoint_processes, "_LOOK_S", 0.01)
    monkeypatch.setattr(StopClock.overdue, "__defaults__", (0.05,))
    context = mp.get_context("fork")
    (told, pids), (receiver, _sender) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    process = context.Process(target=start_and_stop)
    process.start()
    child = psutil.Process(told.recv())
    assert "was stopped (SIGSTOP) for 6 s" in str(answer_of(process, receiver, "it"))
    assert not psutil.wait_procs([child], timeout=30)[1]


def test_an_exception_is_told(tmp_path):
    results = queue.SimpleQueue()
    write_in_processes([], False, 0, [(str(tmp_path / "none/a.distcp"), "a", ([], []))], results)
    assert isinstance(results.get(timeout=1), FileNotFoundError)


def test_files_are_written(tmp_path):
    results = queue.SimpleQueue()
    write_in_processes([], False, 0, [(str(tmp_path / "a.distcp"), "a", ([], []))], results)
    assert results.get(timeout=1) == {0: []} and (tmp_path / "a.distcp").read_bytes() == b""
