"""Ray's own processes on this machine: without them no call of Ray's returns, and nobody says so.

with ray_watch({"raylet": 17, "gcs_server": 18}):
    ...  # if one of them ends, or is stopped (SIGSTOP), this process ends with status 1 and names it
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from ray._private import ray_constants

from slime.processes import termination
from slime.processes.stopped import STOPPED_LIMIT_S, StopClock, is_running, is_stopped

_LOOK_INTERVAL = 2.0  # seconds
_NOTICE_TIME = 1.0  # seconds in which a SIGTERM to all of a run may reach this process too
_WATCHED = (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)


def own_processes() -> dict[str, int]:
    """Process ids of those that this process has started, by Ray's name for them."""
    found = ray._private.worker._global_node.all_processes
    return {name: info.process.pid for name in _WATCHED for info in found.get(name, [])}


@contextmanager
def ray_watch(
    processes: Mapping[str, int],
    interval: float = _LOOK_INTERVAL,
    stopped_limit: float = STOPPED_LIMIT_S,
) -> Iterator[None]:
    """Within, ends this process, with a last line, once one of these can do nothing for it any more.

    Args:
        interval: seconds between two looks.
        stopped_limit: seconds for which one may be stopped.
    """
    over, clock = threading.Event(), StopClock()

    def watch() -> None:
        while not over.wait(interval):
            reason = _failure(processes, clock, stopped_limit)
            if reason is not None and not over.wait(_NOTICE_TIME) and not termination.was_terminated():
                termination.end(f"error: {reason} (Ray cannot go on without it)", status=1)
                return

    thread = threading.Thread(target=watch, name="ray-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _failure(processes: Mapping[str, int], clock: StopClock, limit: float) -> str | None:
    for name, pid in processes.items():
        if not is_running(pid):
            return f"Ray's {name} (process {pid}) has ended"
    stopped = clock.overdue([pid for pid in processes.values() if is_stopped(pid)], limit)
    for name, pid in processes.items():
        if pid in stopped:
            return f"Ray's {name} (process {pid}) is stopped (SIGSTOP), for {stopped[pid]:.0f} s now"
    return None
