"""A child process that cannot outlive the process that started it."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from slime.processes import supervisor
from slime.processes.forked import Declined, ForkedProcess, server_of_run
from slime.processes.stopped import StopClock, is_stopped, with_descendants

logger = logging.getLogger(__name__)

SUPERVISOR_MARGIN_S = 10.0
"""What the supervisor may need beyond the grace period to kill and collect a large tree."""


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"error|exception|panicked|fail|refused|cannot|in use", re.IGNORECASE)
_LINE_CHARACTERS = 300


class ManagedProcess:
    """A command running in its own session, with its output in a log file.

    The command and all its descendants are killed when this process ends for whatever reason,
    SIGKILL included, and when this object is garbage collected. Which thread starts it makes no
    difference. See :mod:`slime.processes.supervisor` for how.

    Args:
        env: changes to this process's environment; None removes a variable.
        imports_much: of a ``python`` command: it may be forked from the run's fork server, if there is one.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        log_path: str | Path,
        env: Mapping[str, str | None] | None = None,
        imports_much: bool = False,
    ) -> None:
        self.name = name
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._stop_clock = StopClock()
        self._supervisor_was_killed = False
        environment = _changed_environment(env or {})
        reader, writer = os.pipe()
        self._lifeline = os.fdopen(writer, "wb", buffering=0)
        self._log = self.log_path.open("a+b")
        with os.fdopen(reader, "rb") as lifeline:
            files = (lifeline.fileno(), self._log.fileno(), self._log.fileno())
            forked = _forked(argv, files, environment) if imports_much else None
            self._supervisor = forked or _started(argv, files, environment)

    @property
    def pid(self) -> int:
        """Process id of the supervisor; the command is its child and in its process group."""
        return self._supervisor.pid

    def poll(self) -> int | None:
        """The exit status once the whole tree is gone, else None; negative is the signal that killed it."""
        returncode = self._supervisor.poll()
        if returncode == -signal.SIGKILL and not self._supervisor_was_killed:
            # Once: its process id is free from now on, and may become that of another group.
            self._supervisor_was_killed = True
            self._kill_group()
        return returncode

    def is_alive(self) -> bool:
        return self.poll() is None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the command and returns its exit status.

        Raises:
            TimeoutError: it still runs after ``timeout`` seconds.
        """
        try:
            return self._supervisor.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name}: still running after {timeout:g} s") from None

    def terminate(self, grace_s: float = 5.0) -> None:
        """Sends SIGTERM, kills what is left of the tree after ``grace_s`` seconds, waits for the end."""
        with contextlib.suppress(BrokenPipeError):  # it may have ended by itself
            if not self._lifeline.closed:
                self._lifeline.write(f"{grace_s}\n".encode())
        try:
            self._supervisor.wait(grace_s + SUPERVISOR_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._kill_group()
            self._supervisor.wait()
        finally:
            self._lifeline.close()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log, for error messages; at most 16 kB.

        Read from the file that was opened at the start: somebody may have removed it, or its directory.
        """
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 16384, max(size - 16384, 0)).decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def exit_reason(self, lines: int = 20) -> str | None:
        """How the process ended and its last words, for a person to read; None while it runs."""
        returncode = self.poll()
        if returncode is None:
            return None
        how = f"killed by {signal_name(-returncode)}" if returncode < 0 else f"exit status {returncode}"
        tail = self.log_tail(lines)
        if not tail:
            return f"{self.name}: {how}; log {self.log_path} is empty"
        # In the first line, which may be the only one that is shown.
        return f"{self.name}: {how}: {last_words(tail)}; log {self.log_path}, last lines:\n{tail}"

    def failure_reason(self, lines: int = 20) -> str | None:
        """`exit_reason`, or that something of its tree has been stopped for a while (SIGSTOP)."""
        if reason := self.exit_reason(lines):
            return reason
        stopped = [pid for pid in with_descendants(self.pid) if is_stopped(pid)]
        for pid, seconds in self._stop_clock.overdue(stopped).items():
            return f"{self.name}: process {pid} is stopped (SIGSTOP), for {seconds:.0f} s now"
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.terminate()

    def _kill_group(self) -> None:
        """Last resort, for when the supervisor was killed or hangs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def last_words(log: str) -> str:
    """The line of a log that says most of why it ends: the last one that tells of an error, else the last."""
    lines = [_COLOUR.sub("", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line] or [""]
    telling = [line for line in lines if _ERROR.search(line)]
    return (telling or lines)[-1][:_LINE_CHARACTERS]


def _started(
    argv: Sequence[str], files: tuple[int, int, int], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """The supervisor of a command. -I keeps the script's folder out of sys.path: it would come first."""
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), *argv]
    stdin, stdout, stderr = files
    return subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=True
    )


def _forked(argv: Sequence[str], files: tuple[int, int, int], env: Mapping[str, str]) -> ForkedProcess | None:
    """Forks the child with the command's imports done; None where there is no server or it declines."""
    server = server_of_run()
    if server is None:
        return None
    try:
        return ForkedProcess(server, argv[1:], files=files, env=env, owner=os.getpid())
    except Declined as reason:
        logger.debug("%s is not forked: %s", argv, reason)
        return None


def _changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
