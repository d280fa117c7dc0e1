"""Whose containers there are: labels, and the end of those whose owner has ended or whose time is up."""

import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from slime.agent.sandbox.engine import call
from slime.agent.sandbox.protocol import SandboxError

logger = logging.getLogger(__name__)

OWNER, DEADLINE = "slime.sandbox.owner", "slime.sandbox.deadline"
_LIMIT_S = 60.0
_FORMAT = "{{.Id}} {{json .Config.Labels}}"


@cache
def _here() -> str:
    """Names the running kernel and the namespace in which process ids mean what they mean here."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    kernel = boot.read_text().strip() if boot.exists() else platform.node()
    return f"{kernel}/{namespace.readlink() if namespace.exists() else ''}"


def labels(lifetime_s: float) -> dict[str, str]:
    """Returns the labels of a container of this process, which nobody needs after so many seconds."""
    return {OWNER: _owner(os.getpid()), DEADLINE: str(int(time.time() + lifetime_s))}


def _owner(pid: int) -> str:
    return f"{_here()} {pid} {psutil.Process(pid).create_time():.0f}"


def is_orphan(found: Mapping[str, str]) -> bool:
    """Says whether the labels are those of a container that is over: of a process of this machine that has
    ended, or of any whose deadline has passed.
    """
    deadline = found.get(DEADLINE, "")
    if deadline.isdigit() and time.time() > int(deadline):
        return True
    place, _, process = found.get(OWNER, "").partition(" ")
    pid, _, started = process.partition(" ")
    if place != _here() or not pid.isdigit():
        return False
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(started)) > 2  # the clock may be set
    except psutil.NoSuchProcess:
        return True


async def remove_orphans(engine: str) -> list[str]:
    """Removes the containers that nobody needs any more, and returns their ids.

    Raises:
        SandboxError: the engine does not answer.
    """
    listed = await call([engine, "ps", "--all", "--quiet", "--filter", f"label={OWNER}"], limit_s=_LIMIT_S)
    if listed.code != 0:
        raise SandboxError(f"ContainerSandbox: {engine} ps: {listed.errors.decode(errors='replace'):.500}")
    ids = listed.output.decode().split()
    # One that has gone meanwhile fails the call, which tells of the others all the same.
    told = await call([engine, "inspect", "--format", _FORMAT, *ids], limit_s=_LIMIT_S) if ids else None
    lines = told.output.decode(errors="replace").splitlines() if told else []
    orphans = [identity for identity, found in map(_read, lines) if is_orphan(found)]
    if orphans:
        logger.warning("removing %d containers that their owner left behind: %s", len(orphans), orphans)
        await call([engine, "rm", "--force", "--volumes", *orphans], limit_s=_LIMIT_S)
    return orphans


def _read(line: str) -> tuple[str, dict[str, str]]:
    """Id and labels; none of a line that was cut off, which the next process reads."""
    identity, _, found = line.partition(" ")
    with suppress(json.JSONDecodeError):
        return identity, json.loads(found) or {}
    return identity, {}
