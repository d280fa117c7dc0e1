"""Runs one command and takes its whole process tree down when the starting process goes away.

Started by :class:`slime.processes.child.ManagedProcess` as a plain file in isolated mode, so it may
import nothing but small modules of the standard library: it is up in about 15 ms.

    python -I -S supervisor.py PARENT_PID COMMAND [ARGUMENT ...]

Standard input is the lifeline, a pipe that only the parent writes to. ``SECONDS\\n`` asks for a stop:
SIGTERM, then SIGKILL that many seconds later. End of file means that the parent is gone: SIGKILL at once.
The parent's process id is polled too, since a forked sibling may hold the pipe open.

``PR_SET_PDEATHSIG`` alone would not do: the kernel sends that signal when the *thread* that forked
the child exits, and it does not reach grandchildren. Here the supervisor's only thread forks the
child, and as "subreaper" it inherits every orphan below it, so none can escape by daemonising.

Exits as the command did: with its status, or by the same signal.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_POLL_S = 0.5
KERNEL_LOG = "/dev/kmsg"
RECENT_S = 600.0
"""Process ids come again: an older line of the kernel's is about another process."""
DEFAULT_GRACE_S = 5.0
"""The grace after a SIGTERM or SIGINT that somebody sends to the supervisor itself."""


def prctl(option: int, value: int) -> None:
    """Calls prctl(2).

    Raises:
        OSError: the kernel refuses the option.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def start_command(argv: list[str]) -> int:
    """Forks and executes the command; it is killed if the supervisor dies. Returns its process id."""
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot start {argv[0]!r}: {error}\n".encode())
    os._exit(127)


def descendants() -> list[int]:
    """Process ids of everything below this process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The command name may hold spaces and brackets; what follows the last one is regular.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def gone_process(pid: int) -> Callable[[], bool]:
    """A function that says whether the process with this number, which lives now, has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda: True
    return lambda: bool(select.select([handle], [], [], 0)[0])


def killed_for_memory(pid: int) -> str | None:
    """The kernel's own line about a process that it killed of late for want of memory.

    None where there is none, and where the kernel's log may not be read, as by most users in containers.
    """
    try:
        log = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        told = [line for line in _kernel_lines(log) if f"Killed process {pid} (" in line]
    finally:
        os.close(log)
    return told[-1].partition(", file-rss")[0] if told else None


def _kernel_lines(log: int) -> Iterator[str]:
    """Recent lines of the kernel's log; each read returns one, ``LEVEL,NUMBER,MICROSECONDS,FLAGS;TEXT``."""
    while True:
        try:
            head, _, text = os.read(log, 8192).decode(errors="replace").partition(";")
        except BrokenPipeError:  # that one has been overwritten
            continue
        except OSError:  # there are no more
            return
        if time.monotonic() - int(head.split(",")[2]) / 1e6 < RECENT_S:
            yield text.partition("\n")[0]


class Supervisor:
    """Watches a child, the process that wants it and the lifeline; see the module's docstring.

    Args:
        is_unwanted: says whether the process that started all this is gone.
    """

    def __init__(self, is_unwanted: Callable[[], bool], child: int) -> None:
        self.is_unwanted, self.child = is_unwanted, child
        self.status: int | None = None
        self.kill_at: float | None = None
        self.wakeup, wakeup_writer = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(wakeup_writer, False)
        signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.stop(DEFAULT_GRACE_S))
        signal.signal(signal.SIGINT, lambda *_: self.stop(DEFAULT_GRACE_S))

    def run(self) -> int:
        """Returns the command's wait status once nothing of its tree is left."""
        lifeline = [0]
        self.reap()  # it may have ended before its end could be told
        while self.status is None:
            ready, _, _ = select.select([*lifeline, self.wakeup], [], [], self.poll_timeout())
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
            self.reap()
            if 0 in ready:
                request = os.read(0, 4096)
                if request:
                    self.stop(float(request.split()[-1]))
                else:
                    lifeline = []
                    self.stop(0.0)
            if self.is_unwanted():
                self.stop(0.0)
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.kill_tree()
        self.kill_tree()
        return self.status

    def poll_timeout(self) -> float:
        """Seconds until there is something to do without an event."""
        if self.kill_at is None:
            return PARENT_POLL_S
        return min(PARENT_POLL_S, max(self.kill_at - time.monotonic(), 0.0))

    def stop(self, grace_s: float) -> None:
        """Asks the command to end; an earlier deadline is never put off."""
        deadline = time.monotonic() + grace_s
        if self.kill_at is None and grace_s > 0 and self.status is None:
            os.kill(self.child, signal.SIGTERM)
        self.kill_at = deadline if self.kill_at is None else min(self.kill_at, deadline)

    def reap(self) -> bool:
        """Collects ended children, orphans included. False if there are none left at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.child:
                self.status = status
                self.tell_want_of_memory()

    def tell_want_of_memory(self) -> None:
        """Adds to the command's log that the kernel killed it, which nobody else would say there."""
        killed = self.status == signal.SIGKILL and self.kill_at is None
        if killed and (told := killed_for_memory(self.child)):
            os.write(2, f"\nerror: the kernel says: {told}\n".encode())

    def kill_tree(self) -> None:
        """SIGKILLs everything below, again and again, until nothing is left.

        Repeated because a process may fork between being listed and being killed.
        """
        while self.reap():
            for pid in descendants():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)


def exit_like(status: int) -> NoReturn:
    """Ends this process the way ``status`` (of waitpid) says that the command ended."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def main(parent: int, argv: list[str]) -> NoReturn:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = start_command(argv)
    exit_like(Supervisor(lambda: os.getppid() != parent, child).run())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
