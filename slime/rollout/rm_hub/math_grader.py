"""``--rm-type math``: equality of mathematical answers, judged by math-verify in killable processes."""

import asyncio
import atexit
import json
import logging
import os
import queue
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from slime.rollout.rm_hub.answers import boxed_answer

logger = logging.getLogger(__name__)

GRADING_LIMIT_S = 10.0
_WORKER = Path(__file__).with_name("math_worker.py")
# Importing sympy and math-verify happens in the first request; a busy machine needs its time for that.
_START_LIMIT_S = 120.0


class GraderError(RuntimeError):
    """The grading process failed for a reason that is not the model's answer."""


async def grade_math(response: str, label: Any) -> float:
    """1.0 if the last ``\\boxed{}`` of the response equals the label, else 0.0.

    An answer without a box, or one that cannot be judged within ``GRADING_LIMIT_S`` seconds, is wrong.

    Raises:
        GraderError: there is no label, the label is no mathematics, or the grading process broke.
    """
    if label is None or not str(label).strip():
        raise GraderError("the sample has no label (--label-key)")
    answer = boxed_answer(response)
    if answer is None:
        return 0.0
    gold = boxed_answer(str(label)) or str(label)
    if answer.strip() == gold.strip():
        return 1.0
    return float(await asyncio.to_thread(_pool().equal, gold, answer))


@cache
def _pool() -> "MathGraderPool":
    pool = MathGraderPool(size=min(4, os.cpu_count() or 1))
    atexit.register(pool.close)
    return pool


class MathGraderPool:
    """A few worker processes, each started when it is first needed, each used by one thread at a time."""

    def __init__(self, size: int, limit_s: float = GRADING_LIMIT_S) -> None:
        self._workers = [MathWorker(limit_s) for _ in range(size)]
        # Last in, first out: a started worker is used before another is started.
        self._idle: queue.LifoQueue[MathWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def equal(self, gold: str, answer: str) -> bool:
        """Whether two answers, written as the content of a box, are equal. Blocks."""
        worker = self._idle.get()
        try:
            return worker.equal(gold, answer)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            worker.stop()


class _WorkerDied(Exception):
    """The process ended without a reply and not by its alarm."""


class MathWorker:
    """One grading process. It dies by its own alarm when an answer takes too long, and is replaced."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None

    def equal(self, gold: str, answer: str) -> bool:
        """See ``MathGraderPool.equal``.

        Raises:
            GraderError: the label is at fault, or the process died twice (not by its time limit).
        """
        try:
            reply = self._judge(gold, answer)
        except _WorkerDied:
            try:
                reply = self._judge(gold, answer)
            except _WorkerDied as error:
                raise GraderError(f"comparing {answer!r:.80} with label {gold!r:.80}: {error}") from error
        if "error" in reply:
            raise GraderError(f"comparing {answer!r:.80} with label {gold!r:.80}: {reply['error']}")
        if "trouble" in reply:
            logger.warning("answer %.80r counts as wrong: %s", answer, reply["trouble"])
        return reply["equal"]

    def _judge(self, gold: str, answer: str) -> dict[str, Any]:
        if self._process is None:
            self._process = _start_process()
            self._ask(self._process, "0", "0", _START_LIMIT_S)
        return self._ask(self._process, gold, answer, self._limit_s)

    def _ask(
        self, process: "subprocess.Popen[str]", gold: str, answer: str, limit_s: float
    ) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        request = {"gold": f"\\boxed{{{gold}}}", "answer": f"\\boxed{{{answer}}}", "limit_s": limit_s}
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        code = process.wait()
        self._process = None
        if code == -signal.SIGALRM:
            return {"equal": False, "trouble": f"no verdict within {limit_s:g} s"}
        raise _WorkerDied(f"the grading process ended with exit status {code}")

    def stop(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _start_process() -> "subprocess.Popen[str]":
    # -P: the folder of the script must not come before the standard library on the import path.
    return subprocess.Popen(
        [sys.executable, "-P", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
