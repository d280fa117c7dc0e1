"""Snapshots of containers: images that their engine makes of them."""

import logging
import uuid
from collections.abc import Callable
from typing import Any

from slime.agent.sandbox import owners
from slime.agent.sandbox.engine import call
from slime.agent.sandbox.protocol import SandboxError
from slime.agent.sandbox.snapshots import Snapshot

logger = logging.getLogger(__name__)

_LIMIT_S = 600.0


async def commit(engine: str, container: str, make: Callable[[str], Any]) -> Snapshot[Any]:
    """An image of what is in a container; processes are no part of it.

    Args:
        make: makes a sandbox of an image.

    Raises:
        SandboxError: the engine does not make it.
    """
    image = f"slime-snapshot:{uuid.uuid4().hex}"
    labels = [f'LABEL "{name}"="{value}"' for name, value in owners.image_labels().items()]
    changes = [word for label in labels for word in ("--change", label)]
    said = await call([engine, "commit", *changes, container, image], limit_s=_LIMIT_S)
    if said.code != 0:
        told = said.errors.decode(errors="replace").strip()
        raise SandboxError(f"ContainerSandbox: no image could be made of a container: {told:.500}")

    async def remove() -> None:
        done = await call([engine, "rmi", image], limit_s=_LIMIT_S)
        if done.code != 0:  # a container of it may run: a process that starts later removes it
            logger.warning("image %s: %s", image, done.errors.decode(errors="replace").strip()[:500])

    return Snapshot(image, lambda: make(image), remove)
