"""Graders in killable processes: ``await grade_in_process("my_task.grading.equal", response, label)``.

What loops for ever, takes all memory, forks or exits there costs its own sample and nothing else. A reward of
your own may call its grader so: a plain function of plain JSON values.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

from slime.processes.marks import kill_marked
from slime.rollout.base_types import GradingFailed

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("grading_worker.py")
# Importing sympy and math-verify takes seconds, and more on a busy machine.
_START_LIMIT_S = 120.0
# The process ends itself by its alarm; one that cannot is ended from outside, this much later.
_GRACE_S = 2.0
# What a process that is about to end may take for it, on a machine whose cores are all busy.
_ENDING_S = 1.0
_MARK = "SLIME_GRADING_PROCESS"
_CHUNK = 1 << 16
_LARGEST_REPLY = 32 << 20
# Of a process that computes for one at a time, and of which there are many.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_PYTHONS_OWN = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONPYCACHEPREFIX", "LANG", "LC_ALL")
GRADING_LIMIT_S = 10.0
_MAX_PROCESSES = 4
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
    pool = GradingPool(size=min(_MAX_PROCESSES, os.cpu_count() or 1))
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


class GraderError(RuntimeError):
    """Grading cannot work at all: the label is at fault, or the process does not start."""


class LabelAtFault(GraderError):
    """The grader says that it cannot grade by this label."""


class ProcessDied(Exception):
    """The process ended without a reply and not by its time limit."""


class GradingProcess:
    """A process for one request at a time; it starts at the first, and a new one after its end."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._loaded: set[str] = set()

    @property
    def pid(self) -> int | None:
        """The process id, if there is a process."""
        return None if self._process is None else self._process.pid

    def load(self, function: str) -> None:
        """Import what is at a dotted path, which may take longer than a call of it. Blocks.

        Raises:
            GraderError: it cannot be imported.
        """
        if self._process is None:
            self._start()
        if function not in self._loaded:
            self._load(function)

    def call(self, function: str, *args: Any, once: bool = False) -> Any:
        """What a function says, found by its dotted path; arguments and result are plain JSON. Blocks.

        Args:
            once: it goes on from an earlier call, so that no other process can answer where this one died.

        Raises:
            GradingFailed: it did not come to an end within the limit, raised, or took its process with it.
            GraderError: it cannot be imported, or (`LabelAtFault`) says that the label is at fault.
        """
        shown = f"{function} on {args!r:.160}"
        try:
            reply = self._call_once(function, args)
        except ProcessDied as death:  # by somebody who was short of memory, perhaps: once more
            if once:
                raise GradingFailed(f"{shown}: {death}") from death
            try:
                reply = self._call_once(function, args)
            except ProcessDied as error:
                raise GradingFailed(f"{shown}: {error}") from error
        if "label_error" in reply:
            raise LabelAtFault(f"{shown}: {reply['label_error']}")
        if "failed" in reply:
            if reply["failed"] == "it left processes behind":
                self.stop()
            raise GradingFailed(f"{shown}: {reply['failed']}")
        return reply["value"]

    def _call_once(self, function: str, args: tuple[Any, ...]) -> dict[str, Any]:
        self.load(function)
        return self._ask({"function": function, "args": args, "limit_s": self._limit_s})

    def _load(self, function: str) -> None:
        try:
            reply = self._ask({"function": function, "args": None, "limit_s": _START_LIMIT_S})
        except ProcessDied as error:
            raise GraderError(f"a process for {function} does not start: {error}") from error
        if "failed" in reply:
            raise GraderError(f"{function} cannot be imported: {reply['failed']}")
        if reply["missing"]:
            _tell("; ".join(f"{name} ({why})" for name, why in reply["missing"].items()))
        self._loaded.add(function)

    def _start(self) -> None:
        self._mark = uuid.uuid4().hex
        self._loaded = set()
        # -P: the folder of the script must not come before the standard library on the import path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**_environment(), _MARK: self._mark},
            start_new_session=True,
        )

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        request = {**asked, "ending_s": _ENDING_S}
        limit_s = request["limit_s"]
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        try:
            line, in_time = _read_line(process.stdout.fileno(), limit_s + _GRACE_S)
        except _ReplyTooLarge as error:
            self.stop()
            return {"failed": str(error)}
        if line:
            return json.loads(line)
        code = None if not in_time else _exit_code(process)
        self.stop()
        if code in (None, -signal.SIGALRM):
            return {"failed": f"no verdict within {limit_s:g} s"}
        raise ProcessDied(f"its process ended with exit status {code}")

    def stop(self) -> None:
        """Kill the process, if there is one, and all that it started."""
        # Whoever closes a pool may do so while another thread still asks.
        process, self._process, mark = self._process, None, self._mark
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        kill_marked(_MARK, mark)


def _environment() -> dict[str, str]:
    """What Python needs to start and to import the same; keys and tokens are nobody's business there."""
    own = {name: os.environ[name] for name in _PYTHONS_OWN if name in os.environ}
    return {**own, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


@cache
def _tell(missing: str) -> None:
    logger.warning("graders run on this machine without being shut off from: %s", missing)


class _ReplyTooLarge(Exception):
    """A process says more than any grader has to say."""


def _read_line(descriptor: int, limit_s: float) -> tuple[bytes, bool]:
    """One line, empty without one; and whether the process said or ended something in time.

    Raises:
        _ReplyTooLarge: it goes on without an end.
    """
    deadline = time.monotonic() + limit_s
    line = bytearray()
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return b"", False
        chunk = os.read(descriptor, _CHUNK)
        if not chunk:
            return b"", True
        line += chunk
        if len(line) > _LARGEST_REPLY:
            raise _ReplyTooLarge(f"a reply of more than {_LARGEST_REPLY >> 20} MiB")
    return bytes(line), True


def _exit_code(process: "subprocess.Popen[bytes]") -> int | None:
    """Returns the exit code of a process; None if it closed its pipe and lives on."""
    try:
        return process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return None
