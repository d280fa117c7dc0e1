"""Processes that are forked from one that has imported what they need (:mod:`slime.processes.fork_server`).

    with closing(ForkServer()) as server:
        server.preload(["torch"])
        process = ForkedProcess(server.address, ["-m", "module", "--flag"], files=(0, 1, 2))
        process.wait(10)

Imports the standard library only, and is also a plain file that Ray starts its workers with:

    python -I -S forked.py PYTHON [setup_worker.py] default_worker.py ARGUMENT ...
"""

import contextlib
import json
import os
import secrets
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "SLIME_FORK_SERVER"
"""``KEY@SOCKET`` of the run's server. Processes of the run inherit it; code in a jail does not."""

_LENGTH = struct.Struct("!Q")
_REQUEST_TIMEOUT = 5.0  # seconds that a request may take to arrive as a whole
_ANSWER_TIMEOUT = 120.0  # seconds: the server may be importing, on a busy machine
_LONGEST_TITLE = 2000  # characters
_LONGEST_ADDRESS = 100  # characters of a socket's path, of which the kernel takes 107


class Declined(RuntimeError):
    """The server is gone, or a forked process would differ from a started one."""


class ForkServer:
    """Starts a server, and ends it and what it has forked on exit or with this process."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.directory = _socket_directory()
        socket_path = str(self.directory / "socket")
        self.address = f"{secrets.token_hex(16)}@{socket_path}"
        command = [sys.executable, "-m", "slime.processes.fork_server", socket_path, " " * _LONGEST_TITLE]
        # Titles must not overwrite the environment, by which processes are told from others'.
        environment = {**(os.environ if env is None else env), VARIABLE: self.address, "SPT_NOENV": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def preload(self, modules: Iterable[str]) -> None:
        """Has it import these next; returns at once."""
        key, path = split_address(self.address)
        client = _connect(path, wait_for_server=True)
        with client:
            _send_request(client, {"key": key, "modules": list(modules)}, ())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """What ``subprocess.Popen`` is, of a process that the server at ``address`` forks.

    Args:
        words: of its command line, behind ``python``.
        files: its standard input, output and error.
        owner: a process that it and what it starts shall not outlive.

    Raises:
        Declined: start an interpreter instead.
    """

    def __init__(
        self,
        address: str,
        words: Sequence[str],
        *,
        files: Sequence[int],
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        owner: int | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._received = b""
        key, path = split_address(address)
        self._socket = _connect(path)
        request = {
            "key": key,
            "words": [str(word) for word in words],
            "env": dict(os.environ if env is None else env),
            "cwd": cwd or os.getcwd(),
            "owner": owner,
        }
        try:
            _send_request(self._socket, request, files)
            answer = self._next_answer(_ANSWER_TIMEOUT)
        except OSError as error:
            self._socket.close()
            raise Declined(f"the fork server does not answer: {error}") from error
        if answer is None or "pid" not in answer:
            self._socket.close()
            raise Declined(f"environment: {answer['declined']}" if answer else "the fork server has hung up")
        self.pid = int(answer["pid"])

    def poll(self) -> int | None:
        """The exit status, negative of the signal that killed it; None while it runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """
        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    answer = self._next_answer(timeout)
                except TimeoutError:
                    return None
                # A server that ends takes its processes with it.
                self.returncode = -signal.SIGKILL if answer is None else int(answer["status"])
                self._socket.close()
        return self.returncode

    def _next_answer(self, timeout: float | None) -> dict[str, Any] | None:
        """Reads the next answer, None if the server is gone; TimeoutError after ``timeout`` seconds."""
        while b"\n" not in self._received:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise TimeoutError("no answer")
            try:
                more = self._socket.recv(4096)
            except ConnectionResetError:
                more = b""
            if not more:
                return None
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def status_of(address: str, pid: int) -> int | None:
    """How a process that the server has forked ended, negative of a signal; None if it has not.

    Raises:
        Declined: the server is gone.
    """
    key, path = split_address(address)
    with _connect(path) as client:
        try:
            _send_request(client, {"key": key, "ended": pid}, ())
            client.settimeout(_ANSWER_TIMEOUT)
            with client.makefile("rb") as answers:
                status = json.loads(answers.readline() or b"{}").get("status")
        except OSError as error:
            raise Declined(f"the fork server does not answer: {error}") from error
    return None if status is None else int(status)


def split_address(address: str) -> tuple[str, str]:
    """The key and the path of the socket."""
    key, _, path = address.partition("@")
    return key, path


def server_of_run() -> str | None:
    """The address of the server that forks processes of this run; None if there is none."""
    return os.environ.get(VARIABLE) or None


def receive_request(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request, and the files that came with it.

    Raises:
        OSError: it does not come within five seconds.
        ValueError: it is none.
    """
    client.settimeout(_REQUEST_TIMEOUT)
    head, files, _, _ = socket.recv_fds(client, _LENGTH.size, 3)
    try:
        if len(head) != _LENGTH.size:
            raise ValueError("no length")
        missing = _LENGTH.unpack(head)[0]
        parts = []
        while missing:
            parts.append(client.recv(min(missing, 1 << 20)))
            if not parts[-1]:
                raise ValueError("half a request")
            missing -= len(parts[-1])
        request: dict[str, Any] = json.loads(b"".join(parts))
    except (OSError, ValueError):
        for file in files:
            os.close(file)
        raise
    return request, files


def worker_python(server: ForkServer) -> str:
    """The path of a program that takes Python's place where Ray starts its workers: it has them forked."""
    ours = [sys.executable, "-I", "-S", __file__, sys.executable]
    path = server.directory / "python"
    path.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f'*/setup_worker.py | */default_worker.py) exec {shlex.join(ours)} "$@" ;;\n'
        f'*) exec {shlex.quote(sys.executable)} "$@" ;;\n'
        "esac\n"
    )
    path.chmod(0o700)
    return str(path)


def _send_request(client: socket.socket, request: Mapping[str, Any], files: Sequence[int]) -> None:
    body = json.dumps(request).encode()
    if files:
        socket.send_fds(client, [_LENGTH.pack(len(body))], list(files))
    else:
        client.sendall(_LENGTH.pack(len(body)))
    client.sendall(body)


def _connect(address: str, wait_for_server: bool = False) -> socket.socket:
    """
    Raises:
        Declined: nobody listens.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for remaining in range(1000 if wait_for_server else 0, -1, -1):
        try:
            client.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if not remaining:
                client.close()
                raise Declined(f"{address}: {error.strerror}") from error
            threading.Event().wait(0.01)
        else:
            break
    return client


def _socket_directory() -> Path:
    """A new directory that only this user can enter."""
    found = tempfile.mkdtemp(prefix="slime-fork-")
    if len(found) > _LONGEST_ADDRESS - len("/socket"):
        Path(found).rmdir()
        found = tempfile.mkdtemp(prefix="slime-fork-", dir="/tmp")
    return Path(found)


def _launch_worker(python: str, words: list[str]) -> None:
    """Has a worker of Ray forked, or becomes it. The worker tells Ray its own process id."""
    address, forkable = server_of_run(), _without_setup(python, words)
    if address is not None and forkable is not None:
        env, worker = forkable
        with contextlib.suppress(Declined):
            ForkedProcess(address, worker, files=(0, 1, 2), env=env)
            return
    os.execv(python, [python, *words])


def _without_setup(python: str, words: list[str]) -> tuple[dict[str, str], list[str]] | None:
    """The environment and the words of a worker whose setup changes nothing but variables, else None."""
    env = dict(os.environ)
    if not words[0].endswith("/setup_worker.py"):
        return env, words
    options = ("--serialized-runtime-env-context=", "--language=")
    given = {option: word for word in words for option in options if word.startswith(option)}
    if given.get(options[1]) != f"{options[1]}PYTHON":
        return None
    context = json.loads(given.get(options[0], options[0] + "{}").removeprefix(options[0]))
    variables = context.pop("env_vars", None) or {}
    if context.pop("py_executable", None) not in (None, python) or any(context.values()):
        return None
    if any("$" in value for value in variables.values()):  # Ray puts other variables in
        return None
    return env | variables, [word for word in words[1:] if not word.startswith(options)]


if __name__ == "__main__":
    _launch_worker(sys.argv[1], sys.argv[2:])
