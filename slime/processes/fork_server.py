"""A process that has imported what others need, and forks them: none of them spends seconds on imports.

    python -m slime.processes.fork_server SOCKET [ROOM]

Requests come with a key, through a socket of this user's (:mod:`slime.processes.forked` sends them): names of
modules to import from now on, the id of a process that was forked and how it ended, or the words behind
``python`` of a process to be, with its environment, its directory and its first three files. A request is
declined if its environment differs from the server's in a variable that a library may have read when it was
imported: whoever asks then starts an interpreter.

It has one thread and never imports Ray, whose library reads the environment of its process once. Standard
input is the lifeline: at its end the server ends, in the middle of an import too, and the kernel kills what
it has forked. The ROOM in its command line is where forked processes write theirs, for who lists processes.
"""

import contextlib
import ctypes
import fcntl
import gc
import hmac
import importlib
import io
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from slime.processes import supervisor
from slime.processes.forked import VARIABLE, receive_request, split_address

PR_SET_PDEATHSIG = supervisor.PR_SET_PDEATHSIG
_OWN_PREFIXES = ("RAY_", "SLIME_", "SGLANG_", "SPT_", "PYTEST_")
_OWN_NAMES = frozenset(
    {"COLUMNS", "LINES", "OLDPWD", "PWD", "PYTHONBREAKPOINT", "PYTHONUNBUFFERED", "SHLVL", "_"}
)
"""Variables that no imported library has read before a process of ours, or of Ray's, begins."""


@dataclass(frozen=True)
class Job:
    """What a forked process does.

    Attributes:
        words: of its command line, behind ``python``: ``script.py ...`` or ``-m module ...``.
        owner: a process whose end it shall not outlive, nor anything that it starts; None for no such.
    """

    words: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    owner: int | None


class ForkServer:
    """Imports and forks as it is asked to.

    Args:
        own_env: the environment that its imports have read.
        key: of a request.
    """

    def __init__(self, listener: socket.socket, own_env: Mapping[str, str], key: str) -> None:
        self._key = key.encode()
        self._listener, self._own_env = listener, _that_counts(own_env)
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._waker = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._waker, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (0, self._wakeup, listener):
            self._selector.register(source, selectors.EVENT_READ)
        self._parent = os.getppid()  # polled too, since a forked sibling of ours may hold the lifeline
        self._to_import: list[str] = []
        self._clients: dict[int, socket.socket] = {}
        self._ended: dict[int, int] = {}

    def serve(self) -> Job | None:
        """Returns a job in the process that was forked for it, None when the server shall end."""
        while True:
            timeout = 0.0 if self._to_import else supervisor.PARENT_POLL_S
            ready = [key.fileobj for key, _ in self._selector.select(timeout)]
            if (0 in ready and not os.read(0, 64)) or os.getppid() != self._parent:
                return None
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._listener in ready:
                job = self._answer(self._listener.accept()[0])
                if job is not None:
                    return job
            elif self._to_import:
                _import(self._to_import.pop(0))

    def _answer(self, client: socket.socket) -> Job | None:
        try:
            request, files = receive_request(client)
        except (OSError, ValueError):  # it went away, or is none of ours
            client.close()
            return None
        if not hmac.compare_digest(str(request.get("key")).encode(), self._key):
            client.close()
            for file in files:
                os.close(file)
            return None
        if "modules" in request:
            self._to_import += request["modules"]
            _say(client, {})
            client.close()
            return None
        if "ended" in request:
            self._reap()
            _say(client, {"status": self._ended.get(request["ended"])})
            client.close()
            return None
        if difference := self._difference(request["env"]):
            _say(client, {"declined": difference})
            job = None
        else:
            while self._to_import:  # what it will need, else each such process would import it
                _import(self._to_import.pop(0))
            job = self._fork(client, request, files)
        for file in files:
            os.close(file)
        return job

    def _difference(self, env: Mapping[str, str]) -> str | None:
        """A variable that is not as it was when the libraries were imported."""
        wanted = _that_counts(env)
        names = sorted(wanted.keys() | self._own_env.keys())
        return next((name for name in names if wanted.get(name) != self._own_env.get(name)), None)

    def _fork(self, client: socket.socket, request: Mapping[str, Any], files: Sequence[int]) -> Job | None:
        gc.freeze()  # else each collection of a forked process would go through, and so copy, all of it
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            supervisor.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            self._forget(client)
            gc.enable()
            job = Job(request["words"], request["env"], request["cwd"], request["owner"])
            _become(job, files)
            return job
        self._clients[pid] = client
        self._ended.pop(pid, None)  # of an earlier process with this id
        _say(client, {"pid": pid})
        return None

    def _reap(self) -> None:
        """Collects ended children and tells those who asked for them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            client = self._clients.pop(pid, None)
            self._ended[pid] = os.waitstatus_to_exitcode(status)
            if client is not None:
                _say(client, {"status": self._ended[pid]})
                client.close()

    def _forget(self, client: socket.socket) -> None:
        """What a forked process has no business with."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._wakeup)
        os.close(self._waker)
        for other in (self._listener, client, *self._clients.values()):
            other.close()


def _that_counts(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of which a forked process cannot have other values than its server."""
    return {
        name: value
        for name, value in env.items()
        if name not in _OWN_NAMES and not name.startswith(_OWN_PREFIXES)
    }


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:  # whoever needs it will say so where it can be seen
        traceback.print_exc()


def _say(client: socket.socket, answer: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it does not want to know any more
        client.sendall(json.dumps(answer).encode() + b"\n")


def _become(job: Job, files: Sequence[int]) -> None:
    """Gives a forked process what a started one would have."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(write_through=bool(job.env.get("PYTHONUNBUFFERED")))
    os.environ.clear()
    os.environ.update(job.env)
    os.chdir(job.cwd)
    if "numpy" in sys.modules:  # each process begins with other numbers, as `random` sees to by itself
        sys.modules["numpy"].random.seed()


def _supervised(job: Job) -> None:
    """Goes on in a child of this process, which becomes its supervisor."""
    assert job.owner is not None
    _set_title([supervisor.__file__, str(job.owner), sys.executable, *job.words])
    supervisor.prctl(supervisor.PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        supervisor.exit_like(supervisor.Supervisor(supervisor.gone_process(job.owner), pid).run())
    supervisor.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _set_title(words: Sequence[str]) -> None:
    """Writes a command line over that of the server, for whoever lists processes; proc_pid_stat(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    title = " ".join(words).encode(errors="surrogateescape")[: room - 1]
    ctypes.memmove(start, title.ljust(room, b"\0"), room)


def run(job: Job) -> None:
    """Does what ``python`` would do with the words of the job."""
    if job.owner is not None:
        _supervised(job)
    if not job.words[0].endswith("default_worker.py"):  # Ray names its own, if it finds the line as it was
        _set_title([sys.executable, *job.words])
    if job.words[0] == "-m":
        sys.argv[:] = job.words[1:]
        sys.path[0] = job.cwd
        runpy.run_module(job.words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = job.words
        sys.path[0] = str(Path(job.words[0]).parent)
        runpy.run_path(job.words[0], run_name="__main__")


def _end_with_lifeline(directory: Path) -> None:
    """Has the kernel tell of its end: a library may take longer to import than a run has to end."""

    def leave(signum: int, frame: FrameType | None) -> None:
        if select.select([0], [], [], 0)[0]:  # nobody writes to it
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(0)

    signal.signal(signal.SIGIO, leave)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    leave(signal.SIGIO, None)  # it may have been before


def main(path: str) -> Job | None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # imports make little garbage, and looking for it takes a fifth of their time
    _end_with_lifeline(Path(path).parent)
    own_env = dict(os.environ)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(128)
        job = ForkServer(listener, own_env, split_address(own_env[VARIABLE])[0]).serve()
    if job is None:
        shutil.rmtree(Path(path).parent, ignore_errors=True)
    return job


if __name__ == "__main__":
    if (job_ := main(sys.argv[1])) is not None:
        run(job_)
