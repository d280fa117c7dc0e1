"""The image of a task: one that is pulled, or one that its Dockerfile is built into."""

import asyncio
import hashlib
from collections import defaultdict
from pathlib import Path
from weakref import WeakKeyDictionary

from slime.agent.harbor.task import HarborTask
from slime.agent.sandbox import SandboxError
from slime.agent.sandbox.engine import call, find_engine

_LOOK_S = 120.0
_building: WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[str, asyncio.Lock]] = WeakKeyDictionary()


async def image_of(task: HarborTask) -> str:
    """Returns the name of the task's image, which is built unless the engine has it.

    Its name says what is in ``environment/``, so a change there makes another image.

    Raises:
        SandboxError: there is no engine, or it cannot build the image.
    """
    if task.image is not None:
        return task.image
    engine, name = find_engine(), await asyncio.to_thread(_name, task.environment)
    locks = _building.setdefault(asyncio.get_running_loop(), defaultdict(asyncio.Lock))
    async with locks[name]:  # each of those who wait here has the limits of its calls
        if (await call([engine, "image", "inspect", name], limit_s=_LOOK_S)).code != 0:
            await _build(engine, name, task)
    return name


async def _build(engine: str, name: str, task: HarborTask) -> None:
    words = [engine, "build", "--quiet", "--tag", name, str(task.environment)]
    said = await call(words, limit_s=task.build_s)
    if said.code != 0:
        told = said.errors[-500:].decode(errors="replace").strip()
        raise SandboxError(f"task {task.folder}: its image cannot be built: {told}")


def _name(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            found.update(f"{file.relative_to(folder)}\0{file.stat().st_mode & 0o111}\0{content}\0".encode())
    return f"slime-task:{found.hexdigest()[:32]}"
