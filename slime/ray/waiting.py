"""Waiting for Ray calls: every wait has a name and a deadline, and the first failure ends it."""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray import ObjectRef


class DeadlineExceeded(TimeoutError):
    """A named wait ran past its deadline."""


class ProcessDied(RuntimeError):
    """The process behind a call ended before it answered."""


def wait_all(refs: Sequence[ObjectRef], what: str, timeout: float) -> list[Any]:
    """The results of all calls, in order; raises as soon as any of them fails.

    ``ray.get`` on a list reports a failed rank only after the ranks before it, which may hang in a
    collective that waits for the failed one.

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
        done, pending = ray.wait(pending, num_returns=1, timeout=remaining)
        _raise_failure(refs.index(done[0]), done[0], what)
    return ray.get(list(refs))


def _raise_failure(rank: int, ref: ObjectRef, what: str) -> None:
    try:
        ray.get(ref)
    except ray.exceptions.RayActorError as error:
        raise ProcessDied(f"{what}: the process of rank {rank} ended: {_exit_detail(error)}") from error


def _exit_detail(error: ray.exceptions.RayActorError) -> str:
    """Ray's own explanation of a death, without its table of ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    details = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return (details or lines)[0]


def wait_one(ref: ObjectRef, what: str, timeout: float) -> Any:
    """The result of one call; see ``wait_all``."""
    return wait_all([ref], what, timeout)[0]
