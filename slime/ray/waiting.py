"""Waiting for Ray calls: every wait has a name and a deadline, and the first failure ends it."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import ObjectRef

from slime.ray.fate import fate

# A traceback up to its last frame: file and code lines, all indented.
_FRAMES = re.compile(r"(?:.*\n)*  File .*\n(?:[ \t]+.*\n)*")


_IN_CONSTRUCTOR = "raised in its creation task"
# What a collective says whose peer has ended.
_LOST_PEER = re.compile(r"connection (closed|reset)|broken pipe|gloo|nccl|remote process exited", re.I)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0  # seconds
_LOOK_INTERVAL = 1.5  # seconds
_DEATH_NOTICE = 5.0  # seconds that Ray may tell of a rank's end after its peers do


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
        meanwhile: called every second or two; what it raises ends the wait.

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
            _raise_failure(refs, ref, what)
    return ray.get(list(refs))


def _raise_failure(refs: Sequence[ObjectRef], ref: ObjectRef, what: str) -> None:
    rank = refs.index(ref)
    try:
        ray.get(ref)
    except ray.exceptions.ObjectLostError as error:  # of what the call was given too
        told = "answered, or was given, is lost with the process or the node that held it"
        raise ProcessDied(f"{what}: what rank {rank} {told}") from error
    except ray.exceptions.RayTaskError as error:
        if _LOST_PEER.search(str(error)):
            _raise_death(refs, what)
        raise
    except ray.exceptions.RayActorError as error:
        detail = _exit_detail(error)
        end = None if _IN_CONSTRUCTOR in str(error) else fate(error, detail)
        how = f"rank {rank} {end}" if end else f"the process of rank {rank} ended: {detail}"
        raise ProcessDied(f"{what}: {how}") from error
    except ray.exceptions.OutOfMemoryError as error:
        told = str(error).strip().partition("\n")[0]
        raise ProcessDied(f"{what}: the process of rank {rank} was killed by Ray: {told}") from error


def _raise_death(refs: Sequence[ObjectRef], what: str) -> None:
    """Raises the death of a rank that has ended: those that spoke with it fail first, and know no more than
    that.
    """
    pending = list(refs)
    deadline = time.monotonic() + _DEATH_NOTICE
    while pending and (left := deadline - time.monotonic()) > 0:
        done, pending = ray.wait(pending, num_returns=1, timeout=left)
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError:
                continue
            except ray.exceptions.RayActorError:
                _raise_failure(refs, ref, what)


def _exit_detail(error: ray.exceptions.RayActorError) -> str:
    """Ray's own explanation of a death, without its table of ids; of a failed constructor its error."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if _IN_CONSTRUCTOR in lines[0] and (frames := _FRAMES.search(text)):
        return text[frames.end() :].strip().splitlines()[0]
    details = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return (details or lines)[0]


def wait_one(ref: ObjectRef, what: str, timeout: float, meanwhile: Callable[[], None] | None = None) -> Any:
    """The result of one call; see ``wait_all``."""
    return wait_all([ref], what, timeout, meanwhile)[0]


def pause_before(repeat: int) -> None:
    """Leaves what has failed time to recover: half a second before the first repeat, each time twice as long.

    Args:
        repeat: from 1 on; the pause of the fourth, 4 seconds, is that of later ones too. None for 0.
    """
    if repeat:
        time.sleep(min(_FIRST_PAUSE * 2 ** (repeat - 1), _LONGEST_PAUSE))
