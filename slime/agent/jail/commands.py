"""Commands inside a jail: their limits, their output up to a bound, their end at a deadline."""

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

_CHUNK = 1 << 16
_FLOOD = 64
"""A command that writes this many times what is kept of its output is killed."""
TIMED_OUT = -1


_RESOURCES = {
    "memory_bytes": resource.RLIMIT_AS,
    "cpu_s": resource.RLIMIT_CPU,
    "file_bytes": resource.RLIMIT_FSIZE,
    "processes": resource.RLIMIT_NPROC,
    "open_files": resource.RLIMIT_NOFILE,
}


def set_limits(limits: Mapping[str, int]) -> None:
    """Of the calling process and all that come from it; those that are named, and no core file."""
    for name, limit in _RESOURCES.items():
        if name in limits:
            _, most = resource.getrlimit(limit)
            value = limits[name] if most == resource.RLIM_INFINITY else min(limits[name], most)
            resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_command(
    request: Mapping[str, Any], limits: Mapping[str, int], workspace: str, stdin: int
) -> dict[str, Any]:
    """Run a line of shell; ``exit_code``, ``output`` as bytes in latin-1, ``truncated``.

    Standard output and standard error are one stream. The command ends when its first process does: what it
    left running goes on, with its output going nowhere.

    Args:
        stdin: where the parent's requests come from; when that closes, so does everything.
    """
    process = subprocess.Popen(
        ["/bin/sh", "-c", request["cmd"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=request["workdir"] or workspace,
        env={"HOME": workspace, **request["env"]},
        start_new_session=True,
        preexec_fn=lambda: set_limits(limits),
    )
    assert process.stdout is not None
    kept, ended = _drain(process, stdin, time.monotonic() + request["timeout"], limits["output_bytes"])
    if not ended:
        kill_group(process.pid)
    code = process.wait()
    process.stdout.close()
    return {
        "exit_code": code if ended else TIMED_OUT if ended is None else -signal.SIGKILL,
        "output": bytes(kept[: limits["output_bytes"]]).decode("latin-1"),
        "truncated": len(kept) > limits["output_bytes"],
    }


def _drain(
    process: "subprocess.Popen[bytes]", stdin: int, deadline: float, bound: int
) -> tuple[bytearray, bool | None]:
    """Output, a byte more than the bound at most; True if the process ended, None if its time did."""
    assert process.stdout is not None
    kept, seen = bytearray(), 0
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(stdin, selectors.EVENT_READ)
        ending = os.pidfd_open(process.pid)
        try:
            selector.register(ending, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                ready = {key.fd for key, _ in selector.select(left)}
                if stdin in ready:
                    os._exit(0)  # the parent has gone
                if process.stdout.fileno() in ready:
                    chunk = os.read(process.stdout.fileno(), _CHUNK)
                    kept += chunk[: max(0, bound + 1 - len(kept))]
                    seen += len(chunk)
                    if not chunk:
                        selector.unregister(process.stdout)
                elif ending in ready:
                    return kept, True
                if seen > _FLOOD * bound:
                    return kept, False
            return kept, None
        finally:
            os.close(ending)


def kill_group(leader: int) -> None:
    """The session of a command, and with it its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
