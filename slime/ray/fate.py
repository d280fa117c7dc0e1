"""How the process of an actor ended: Ray tells that it is gone, and guesses at the reason."""

import re
import signal
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.processes.child import signal_name
from slime.processes.forked import Declined, server_of_run, status_of
from slime.processes.supervisor import killed_for_memory

_ASK_TIMEOUT = 15.0  # seconds for another node to say what it knows
_NOTICE_TIME = 1.0  # seconds that Ray may know of a death before the parent of the process does
_UNEXPLAINED = "connection error code"
_PID, _ADDRESS = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE), re.compile(r"^\s*ip: (\S+)$", re.MULTILINE)
_CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received|Fatal Python error: (.+)")
_LONGEST_LOG = 1 << 20  # bytes from its end


def fate(error: ray.exceptions.RayActorError, explained: str) -> str | None:
    """``(process 17 on 10.0.0.2) was killed by SIGKILL``, or with ``explained`` if that says enough.

    None if Ray does not tell which process it was.
    """
    pid, address = _PID.search(str(error)), _ADDRESS.search(str(error))
    if pid is None or address is None:
        return None
    where = f"(process {pid[1]} on {address[1]})"
    if _UNEXPLAINED not in explained:
        return f"{where} ended: {explained}"
    return f"{where} {_ask(int(pid[1]), address[1]) or 'ended without a word'}"


def _ask(pid: int, address: str) -> str | None:
    """What its node knows of its end; None if the node does not answer."""
    if address == ray.util.get_node_ip_address():
        return known_end(pid)
    for node in ray.nodes():
        if node["Alive"] and node["NodeManagerAddress"] == address:
            place = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            answer = _known_there.options(scheduling_strategy=place).remote(pid)
            try:
                return str(ray.get(answer, timeout=_ASK_TIMEOUT))
            except ray.exceptions.RayError:  # the node is gone as well, or has no time
                return None
    return None


def known_end(pid: int) -> str:
    """How a worker of Ray on this node ended, in words that go on from its name."""
    status = _status(pid)
    if status is not None and status >= 0:
        return f"ended with exit status {status}"
    if status is not None and status != -signal.SIGKILL:
        return f"was killed by {signal_name(-status)}"
    if status is None and (crash := _crash(pid)):
        return crash
    # Every other end of a Python process leaves a trace.
    if told := killed_for_memory(pid):
        return f"was killed by SIGKILL; the kernel says: {told}"
    certain = "was killed by SIGKILL" if status else "left no trace, as after SIGKILL"
    return f"{certain} (somebody sent it, or the kernel for want of memory)"


def _status(pid: int) -> int | None:
    """Returns the status that the parent was told, if that is the run's fork server."""
    server = server_of_run()
    deadline = time.monotonic() + _NOTICE_TIME
    while server is not None:
        try:
            status = status_of(server, pid)
        except Declined:
            return None
        if status is not None or time.monotonic() > deadline:
            return status
        time.sleep(0.05)
    return None


def _crash(pid: int) -> str | None:
    """What a crash has written to the log of the process."""
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    for log in logs.glob(f"worker-*-{pid}.err"):
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _LONGEST_LOG, 0))
            found = _CRASH.search(file.read().decode(errors="replace"))
        if found is not None:
            how = f"was killed by {found[1]}" if found[1] else f"ended: {found[2]}"
            return f"{how}; its log is {log}"
    return None


_known_there = ray.remote(num_cpus=0)(known_end)
