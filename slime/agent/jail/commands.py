"""Commands inside a jail: their limits, their output up to a bound, their end at a deadline."""

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from slime.agent.jail import landlock
from slime.agent.jail.descendants import Descendants

_CHUNK = 1 << 16
_STDIN = 0
_FLOOD = 64
"""A command that writes this many times what is kept of its output is killed."""
TIMED_OUT = -1
_LOOK_S = 0.25
"""The pause between two looks at the processor time of all processes together."""

_RESOURCES = {
    "memory_bytes": resource.RLIMIT_AS,
    "cpu_s": resource.RLIMIT_CPU,
    "file_bytes": resource.RLIMIT_FSIZE,
    "processes": resource.RLIMIT_NPROC,
    "open_files": resource.RLIMIT_NOFILE,
}


def set_limits(limits: Mapping[str, int]) -> None:
    """Sets the named limits of the calling process and its descendants, and allows no core file."""
    for name, limit in _RESOURCES.items():
        if name in limits:
            _, most = resource.getrlimit(limit)
            value = limits[name] if most == resource.RLIM_INFINITY else min(limits[name], most)
            resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_command(
    request: Mapping[str, Any],
    limits: Mapping[str, int],
    workspace: str,
    descendants: Descendants,
    parent_gone: Callable[[], None],
) -> dict[str, Any]:
    """Run a line of shell; ``exit_code``, ``output`` as bytes in latin-1, ``truncated``.

    Standard output and standard error are one stream. The command ends when its first process does.

    Args:
        request: whose ``apart`` has it send no signals but to processes that it has started itself.
        descendants: whose processor time is bounded by the limit ``total_cpu_s``.
        parent_gone: called when the parent's requests, on standard input, come to an end.
    """
    _refuse_without_time(descendants, limits)
    process = subprocess.Popen(
        ["/bin/sh", "-c", request["cmd"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=request["workdir"] or workspace,
        env={"HOME": workspace, **request["env"]},
        start_new_session=True,
        preexec_fn=lambda: _confine(limits, request["apart"]),
    )
    assert process.stdout is not None
    watch = _Watch(time.monotonic() + request["timeout"], limits, descendants, parent_gone)
    kept, exit_code = _drain(process, watch)
    if exit_code is not None:
        kill_group(process.pid)
    code = process.wait()
    process.stdout.close()
    return {
        "exit_code": code if exit_code is None else exit_code,
        "output": bytes(kept[: limits["output_bytes"]]).decode("latin-1"),
        "truncated": len(kept) > limits["output_bytes"],
    }


def is_out_of_time(descendants: Descendants, limits: Mapping[str, int]) -> bool:
    """Whether all processes together have used their processor time."""
    return descendants.used_s() >= limits["total_cpu_s"]


def _refuse_without_time(descendants: Descendants, limits: Mapping[str, int]) -> None:
    if is_out_of_time(descendants, limits):
        raise ValueError(
            f"limits.total_cpu_s: its processes have used {descendants.used_s():.1f} processor seconds "
            f"(wanted: less than {limits['total_cpu_s']}, for all commands together)"
        )


def _confine(limits: Mapping[str, int], apart: bool) -> None:
    set_limits(limits)
    if apart:
        with contextlib.suppress(OSError):  # a seventeenth layer; containers bring some
            landlock.signal_only_own()


class _Watch(NamedTuple):
    deadline: float
    limits: Mapping[str, int]
    descendants: Descendants
    parent_gone: Callable[[], None]


def _drain(process: "subprocess.Popen[bytes]", watch: _Watch) -> tuple[bytearray, int | None]:
    """Output, a byte more than the bound at most; the exit code of what has to be ended, else None."""
    assert process.stdout is not None
    kept, seen, bound = bytearray(), 0, watch.limits["output_bytes"]
    next_look = time.monotonic() + _LOOK_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(_STDIN, selectors.EVENT_READ)
        ending = os.pidfd_open(process.pid)
        try:
            selector.register(ending, selectors.EVENT_READ)
            while (left := watch.deadline - (now := time.monotonic())) > 0:
                ready = {key.fd for key, _ in selector.select(min(left, max(0.0, next_look - now)))}
                if _STDIN in ready:
                    watch.parent_gone()
                if process.stdout.fileno() in ready:
                    chunk = os.read(process.stdout.fileno(), _CHUNK)
                    kept += chunk[: max(0, bound + 1 - len(kept))]
                    seen += len(chunk)
                    if not chunk:
                        selector.unregister(process.stdout)
                elif ending in ready:
                    return kept, None
                if seen > _FLOOD * bound:
                    return kept, -signal.SIGKILL
                if time.monotonic() >= next_look:
                    if is_out_of_time(watch.descendants, watch.limits):
                        return kept, -signal.SIGXCPU
                    next_look = time.monotonic() + _LOOK_S
            return kept, TIMED_OUT
        finally:
            os.close(ending)


def kill_group(leader: int) -> None:
    """The session of a command, and with it its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
