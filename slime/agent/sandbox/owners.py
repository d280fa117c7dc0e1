"""Whose containers there are: labels, and the end of those whose owner has ended or whose time is up.

Several machines may use one engine, and their clocks differ. So a process judges owners of its own kernel
alone, and the age of others' containers by the engine's clock, which has also dated their start.
"""

import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path

import psutil

from slime.agent.sandbox.engine import call
from slime.agent.sandbox.protocol import SandboxError

logger = logging.getLogger(__name__)

OWNER, LIFETIME, KEPT_BY = "slime.sandbox.owner", "slime.sandbox.lifetime", "slime.sandbox.snapshot"
_LIMIT_S = 60.0
_FORMAT = "{{.Id}} {{json .Created}} {{json .Config.Labels}}"
_CLOCK = "{{json .SystemTime}}"


@cache
def _here() -> str:
    """Names the running kernel and the namespace in which process ids mean what they mean here."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    kernel = boot.read_text().strip() if boot.exists() else platform.node()
    return f"{kernel}/{namespace.readlink() if namespace.exists() else ''}"


def labels(lifetime_s: float) -> dict[str, str]:
    """Returns the labels of a container of this process, which nobody needs after so many seconds."""
    return {OWNER: _owner(os.getpid()), LIFETIME: str(int(lifetime_s))}


def image_labels() -> dict[str, str]:
    """Returns the labels of an image that is a snapshot of this process's."""
    return {KEPT_BY: _owner(os.getpid())}


def _owner(pid: int) -> str:
    return f"{_here()} {pid} {psutil.Process(pid).create_time():.0f}"


def is_orphan(found: Mapping[str, str], age_s: float | None = None) -> bool:
    """Says whether the labels are those of a container that is over: of a process of this machine that has
    ended, or of any machine's whose lifetime has passed.

    Args:
        age_s: seconds since its start; None where nobody can tell.
    """
    lifetime = found.get(LIFETIME, "")
    if age_s is not None and lifetime.isdigit() and age_s > int(lifetime):
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
    if not ids:
        return []
    now = await _engine_clock(engine)
    # One that has gone meanwhile fails the call, which tells of the others all the same.
    told = await call([engine, "inspect", "--format", _FORMAT, *ids], limit_s=_LIMIT_S)
    lines = told.output.decode(errors="replace").splitlines()
    orphans = [
        identity for identity, begun, found in map(_read, lines) if is_orphan(found, _seconds(begun, now))
    ]
    if orphans:
        logger.warning("removing %d containers that their owner left behind: %s", len(orphans), orphans)
        await call([engine, "rm", "--force", "--volumes", *orphans], limit_s=_LIMIT_S)
    return orphans


async def remove_orphaned_images(engine: str) -> list[str]:
    """Removes the snapshots of processes of this machine that have ended, and returns their ids."""
    listed = await call([engine, "images", "--quiet", "--filter", f"label={KEPT_BY}"], limit_s=_LIMIT_S)
    ids = [*dict.fromkeys(listed.output.decode().split())] if listed.code == 0 else []
    if not ids:
        return []
    told = await call([engine, "image", "inspect", "--format", _FORMAT, *ids], limit_s=_LIMIT_S)
    read = map(_read, told.output.decode(errors="replace").splitlines())
    orphans = [identity for identity, _, found in read if is_orphan({OWNER: found.get(KEPT_BY, "")})]
    for one in orphans:  # one that is in use stays
        await call([engine, "rmi", one], limit_s=_LIMIT_S)
    return orphans


async def _engine_clock(engine: str) -> datetime | None:
    """What time it is for the engine; None for one that does not tell, as podman."""
    told = await call([engine, "info", "--format", _CLOCK], limit_s=_LIMIT_S)
    with suppress(ValueError, TypeError):
        return datetime.fromisoformat(json.loads(told.output)) if told.code == 0 else None
    return None


def _seconds(begun: datetime | None, now: datetime | None) -> float | None:
    return None if begun is None or now is None else (now - begun).total_seconds()


def _read(line: str) -> tuple[str, datetime | None, dict[str, str]]:
    """Id, start and labels; no label of a line that was cut off, which the next process reads."""
    identity, begun, found = (*line.split(" ", 2), "", "")[:3]
    with suppress(ValueError, TypeError):
        return identity, datetime.fromisoformat(json.loads(begun)), json.loads(found) or {}
    return identity, None, {}
