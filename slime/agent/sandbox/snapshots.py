"""Sandboxes that start from what another one was prepared to be: a repository cloned, its packages installed.

snapshot = await sandbox.snapshot()
async with snapshot.sandbox() as other:     # its files are those of the first one, and its own
    ...
await snapshot.remove()
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from slime.agent.sandbox.protocol import Sandbox, SandboxError

S = TypeVar("S", bound=Sandbox)


class Snapshot(Generic[S]):
    """Files of a sandbox as they once were. No sandbox that starts from them changes them.

    Attributes:
        source: what they are kept in: the name of an image or a template, or the path of a file.
    """

    def __init__(self, source: str, make: Callable[[], S], remove: Callable[[], Awaitable[None]]) -> None:
        self.source, self._make, self._remove = source, make, remove

    def sandbox(self) -> S:
        """Another sandbox, with the options of the first one, which has not been entered."""
        return self._make()

    async def remove(self) -> None:
        """Removes what it is kept in, once no sandbox that has started from it is open."""
        await self._remove()


class Prepared(Generic[S]):
    """Starts sandboxes in which something has been prepared: once, where the sandbox has snapshots.

    Args:
        make: makes one, which has not been entered.
        prepare: prepares one, and raises where it cannot.
    """

    def __init__(self, make: Callable[[], S], prepare: Callable[[S], Awaitable[None]]) -> None:
        self._make, self._prepare = make, prepare
        self._snapshot: Snapshot[S] | None = None
        self._busy = asyncio.Lock()

    async def start(self) -> S:
        """A sandbox that is entered and prepared.

        Raises:
            SandboxError: it cannot be had, or cannot be prepared.
        """
        made = self._make()
        if has_snapshots(made):
            return await (await self.snapshot()).sandbox().__aenter__()
        return await self._prepared(made)

    async def snapshot(self) -> Snapshot[S]:
        """What all of them start from. Whoever comes first prepares it, and the others wait.

        Raises:
            SandboxError: it cannot be had; whoever comes next tries again.
        """
        async with self._busy:
            if self._snapshot is None:
                first: Any = await self._prepared(self._make())
                try:
                    self._snapshot = await first.snapshot()
                finally:
                    await first.__aexit__(None, None, None)
            return self._snapshot

    async def _prepared(self, made: S) -> S:
        entered = await made.__aenter__()
        try:
            await self._prepare(entered)
        except BaseException as error:
            await entered.__aexit__(None, None, None)
            if isinstance(error, Exception) and not isinstance(error, SandboxError):
                raise SandboxError(f"{type(made).__name__}: could not be prepared: {error!r:.500}") from error
            raise
        return entered

    async def close(self) -> None:
        """Removes the snapshot, if there is one."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            await snapshot.remove()


def has_snapshots(sandbox: object) -> bool:
    """Whether sandboxes of this kind can be taken a snapshot of."""
    return hasattr(sandbox, "snapshot")


def by_line(line: str, *, timeout: float = 1800) -> Callable[[Any], Awaitable[None]]:
    """Prepares a sandbox by a line of shell, which has to succeed."""

    async def prepare(sandbox: Any) -> None:
        code, said = await sandbox.exec(line, timeout=timeout)
        if code != 0:
            raise SandboxError(f"{line:.200}: exit code {code}: {said.strip()[-500:]}")

    return prepare
