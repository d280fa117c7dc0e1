"""Waiting for Ray calls: every wait has a name and a deadline, and the first failure ends it."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef

# A traceback up to its last frame: file and code lines, all indented.
_FRAMES = re.compile(r"(?:.*\n)*  File .*\n(?:[ \t]+.*\n)*")


_LOOK_INTERVAL = 5.0  # seconds


class DeadlineExceeded(TimeoutError):
    """A named wait ran past its deadline."""


class ProcessDied(RuntimeError):
    """The process behind a call ended before it answered."""


def wait_all(
    refs: Sequence[ObjectRef], what: str, timeout: float, meanwhile: Callable[[], None] | None = None
) -> list[Any]:
    """The results of all calls, in order; raises as soon as any of them fails.

    ``ray.get`` on a list reports a failed rank only after the ranks before it, which may hang in a
    collective that waits for the failed one.

    Args:
        meanwhile: called every few seconds; what it raises ends the wait.

    Raises:
        DeadlineExceeded: names what was waited for, which calls are missing, and since when.
        ProcessDied: names what was waited for, and the rank.
    """
    pending = list(refs)
    start = time.monotonic()
    while pending:
        remaining = timeout - (time.monotonic() - start)
        if remaining <= 0:
            missing = [i for i, ref in enumerate(refs) if ref in pending]
            raise DeadlineExceeded(f"{what}: no answer from rank(s) {missing} after {timeout:.0f} s")
        done, pending = ray.wait(pending, num_returns=1, timeout=min(remaining, _LOOK_INTERVAL))
        if not done and meanwhile is not None:
            meanwhile()
        for ref in done:  # none when the time has run out
            _raise_failure(refs.index(ref), ref, what)
    return ray.get(list(refs))


def _raise_failure(rank: int, ref: ObjectRef, what: str) -> None:
    try:
        ray.get(ref)
    except ray.exceptions.RayActorError as error:
        raise ProcessDied(f"{what}: the process of rank {rank} ended: {_exit_detail(error)}") from error


def _exit_detail(error: ray.exceptions.RayActorError) -> str:
    """Ray's own explanation of a death, without its table of ids; of a failed constructor its error."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "raised in its creation task" in lines[0] and (frames := _FRAMES.search(text)):
        return text[frames.end() :].strip().splitlines()[0]
    details = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return (details or lines)[0]


def wait_one(ref: ObjectRef, what: str, timeout: float, meanwhile: Callable[[], None] | None = None) -> Any:
    """The result of one call; see ``wait_all``."""
    return wait_all([ref], what, timeout, meanwhile)[0]
