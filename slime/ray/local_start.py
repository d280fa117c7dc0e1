"""Starting Ray on this machine, which takes long where it is busy: Ray itself gives up after half a minute.

Two of its processes, which import Ray and ask for news all the time, are left out: the autoscaler's monitor,
and the reader of logs for screens of drivers, unless somebody wants to see them there.

A raylet ends when its agents are not up after 20 seconds, which nothing can change: they are Python processes
that import much. The second time their files are in memory. Where much else runs it is a matter of luck, and
is tried until ``--cluster-timeout`` has passed.

Where a process is stopped or hangs no call of Ray's returns in time: `start_watch` ends the run then. It is
a thread, so the port of the GCS, for which Ray waits with the interpreter's lock, is waited for here first.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import node, services, utils
from ray._private.node import Node

from slime.processes import termination
from slime.processes.reaper import Known, living, reap
from slime.processes.stopped import STOPPED_LIMIT_S
from slime.ray.ending import CannotStart
from slime.ray.start_watch import name_of, start_watch

logger = logging.getLogger(__name__)

_TRIES = 2
_MAX_TRIES = 6
"""On a busy machine, while there is time."""
_BUSY = 2.0  # processes that want to run, per CPU
_LONGEST_REASON = 300  # characters
_LOOK_INTERVAL = 0.5  # seconds
_PORT_INTERVAL = 0.1  # seconds between two looks for the port of the GCS
_MISSED = 5  # looks: one that has just been forked has no name yet
_PORT_GRACE_MS = 1000
"""For Ray to read it, or to say that it is not there."""
_GRACE = 30.0  # seconds beyond a try's own, in which Ray may say itself what is wrong


class RayNotStarted(CannotStart):
    """Ray did not come up on this machine."""


class _GivenUp(Exception):
    """No RuntimeError, after which Ray would go on."""


def start_ray(timeout: float, init: Callable[[], object], logs_are_shown: bool = False) -> None:
    """Calls ``init``, which starts Ray as a child of this process, once more if it fails.

    On a busy machine it is called up to six times, as long as ``timeout`` has not passed.

    Args:
        timeout: seconds that Ray has each time, as far as it can be told.
        logs_are_shown: on screens of drivers.

    A try that hangs, or in which a process of Ray's is stopped, ends this process.

    Raises:
        RayNotStarted: says what to do.
    """
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(max(int(timeout), 1)))
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(max(int(timeout * 1000), 1)))
    deadline = time.monotonic() + timeout
    for number in range(1, _MAX_TRIES + 1):
        try:
            with start_watch(timeout + _GRACE, stopped_limit=STOPPED_LIMIT_S):
                _start_once(timeout, init, logs_are_shown)
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:_LONGEST_REASON]
            if number >= _TRIES and not (number < _MAX_TRIES and _is_busy() and time.monotonic() < deadline):
                raise RayNotStarted(_advice(timeout, number, reason)) from error
            logger.warning("Ray did not start, and is started again: %s", reason)
        else:
            return


def _start_once(timeout: float, init: Callable[[], object], logs_are_shown: bool) -> None:
    """Calls ``init``; if it fails, ends what it has started."""
    before = living({}, os.getpid())
    try:
        with (
            _patient(timeout),
            _letting_others_look(),
            _without_idle_processes(logs_are_shown),
            _leaving_sigterm_alone(),
        ):
            init()
    except Exception:
        _end_what_was_started(before)
        raise


def _is_busy() -> bool:
    return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)


def _advice(timeout: float, tries: int, reason: str) -> str:
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    return (
        f"Ray did not start on this machine in {tries} tries: {reason} (wanted: less load, which is "
        f"{load:.1f} on {cpus} CPUs, a longer --cluster-timeout than {timeout:g}, or RAY_ADDRESS of a "
        "cluster that runs)"
    )


@contextmanager
def _patient(timeout: float) -> Iterator[None]:
    """Within, Ray waits so long for its raylet to be known, and no longer than that lives."""
    get_node = services.get_node
    deadline = time.monotonic() + timeout

    def wait_for_node(*arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return get_node(*arguments, **options)
            except RuntimeError as error:  # it has not registered yet
                if not _lives("raylet"):
                    raise _GivenUp("its raylet has ended, see raylet.err in Ray's logs") from error
                if time.monotonic() > deadline:
                    raise _GivenUp(f"its raylet is not up after {timeout:g} s") from error
            time.sleep(_LOOK_INTERVAL)

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = get_node


@contextmanager
def _letting_others_look() -> Iterator[None]:
    """Within, Ray waits for the port of its GCS while other threads run, and no longer than that lives.

    Older ones, as 2.52, choose the port themselves and wait for none.
    """
    wait = getattr(node, "wait_for_persisted_port", None)
    if wait is None:
        yield
        return

    def wait_for_port(directory: str, node_id: str, port_name: str, timeout_ms: int) -> int:
        file = Path(directory) / node.get_port_filename(node_id, port_name)
        deadline, missed = time.monotonic() + timeout_ms / 1000, 0
        while not file.exists() and time.monotonic() < deadline:
            missed = 0 if _lives("gcs_server") else missed + 1
            if missed == _MISSED:
                raise _GivenUp("its GCS has ended, see gcs_server.err in Ray's logs")
            time.sleep(_PORT_INTERVAL)
        return int(wait(directory, node_id, port_name, timeout_ms=_PORT_GRACE_MS))

    node.wait_for_persisted_port = wait_for_port
    try:
        yield
    finally:
        node.wait_for_persisted_port = wait


@contextmanager
def _without_idle_processes(logs_are_shown: bool) -> Iterator[None]:
    """Within, Ray starts none that a cluster of one machine, which does not grow, can do without."""
    names = ["start_monitor", *([] if logs_are_shown else ["start_log_monitor"])]
    starts = {name: getattr(Node, name) for name in names if hasattr(Node, name)}
    for name in starts:
        setattr(Node, name, lambda node: None)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)


@contextmanager
def _leaving_sigterm_alone() -> Iterator[None]:
    """Within, Ray does not end this process in a way of its own, without a last line, where we end it."""
    set_handler = utils.set_sigterm_handler
    if termination.is_ours():
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


def _lives(name: str) -> bool:
    """Whether a process below this one has this name; a zombie has no command line."""
    return any(name_of(pid) == name for pid in living({}, os.getpid()))


def _end_what_was_started(before: Known) -> None:
    with suppress(Exception):  # it has told what is wrong with it already
        ray.shutdown()
    reap({pid: start for pid, start in living({}, os.getpid()).items() if pid not in before})
