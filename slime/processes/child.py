"""A child process that cannot outlive the process that started it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from slime.processes import supervisor

SUPERVISOR_MARGIN_S = 10.0
"""What the supervisor may need beyond the grace period to kill and collect a large tree."""


class ManagedProcess:
    """A command running in its own session, with its output in a log file.

    The command and all its descendants are killed when this process ends for whatever reason,
    SIGKILL included, and when this object is garbage collected. Which thread starts it makes no
    difference. See :mod:`slime.processes.supervisor` for how.

    ``env`` holds changes to this process's environment; None removes a variable.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        log_path: str | Path,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.name = name
        self.log_path = Path(log_path)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # -I keeps the script's folder out of sys.path, where it would come before the standard library.
        command = [sys.executable, "-I", "-S", supervisor.__file__, str(os.getpid()), *argv]
        with self.log_path.open("ab") as log:
            self._supervisor = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_changed_environment(env or {}),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the supervisor; the command is its child and in its process group."""
        return self._supervisor.pid

    def poll(self) -> int | None:
        """The exit status once the whole tree is gone, else None; negative is the signal that killed it."""
        returncode = self._supervisor.poll()
        if returncode == -signal.SIGKILL:
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
            self._supervisor.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name}: still running after {timeout:g} s") from None
        return self._supervisor.returncode

    def terminate(self, grace_s: float = 5.0) -> None:
        """Sends SIGTERM, kills what is left of the tree after ``grace_s`` seconds, waits for the end."""
        stdin = self._supervisor.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it may have ended by itself
            if not stdin.closed:
                stdin.write(f"{grace_s}\n".encode())
                stdin.flush()
        try:
            self._supervisor.wait(grace_s + SUPERVISOR_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._kill_group()
            self._supervisor.wait()
        finally:
            self._close_lifeline()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log, for error messages; at most 16 kB."""
        with self.log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(log.tell() - 16384, 0))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def exit_reason(self, lines: int = 20) -> str | None:
        """How the process ended and its last words, for a person to read; None while it runs."""
        returncode = self.poll()
        if returncode is None:
            return None
        how = f"killed by {_signal_name(-returncode)}" if returncode < 0 else f"exit status {returncode}"
        tail = self.log_tail(lines)
        return f"{self.name}: {how}; log {self.log_path}" + (
            f", last lines:\n{tail}" if tail else " is empty"
        )

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

    def _close_lifeline(self) -> None:
        if self._supervisor.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._supervisor.stdin.close()


def _changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
