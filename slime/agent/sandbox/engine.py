"""The command line of a container engine, docker or podman: calls with a deadline and bounded output."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slime.agent.sandbox.protocol import SandboxError

ENGINE = "SLIME_AGENT_CONTAINER_ENGINE"
"""The environment variable that names the engine's program, by name or path."""
_KNOWN = ("docker", "podman")
_CHUNK = 1 << 16
FLOOD = 64
"""A call that writes so many times what is kept of it is not waited for."""
_END_S = 10.0


class NoEngine(SandboxError):
    """There is no container engine here."""


class Said(NamedTuple):
    """How a call ended, and what it wrote."""

    code: int
    output: bytes
    errors: bytes = b""


def find_engine(asked: str | None = None) -> str:
    """Returns the path of the engine's program: the one that is asked for, of ``ENGINE``, docker or podman.

    Raises:
        NoEngine: there is none.
    """
    asked = asked or os.environ.get(ENGINE)
    for name in (asked,) if asked else _KNOWN:
        if path := shutil.which(name):
            return path
    found = f"{ENGINE}={asked} is no program" if asked else "neither docker nor podman is on PATH"
    raise NoEngine(f"ContainerSandbox: {found} (wanted: an engine that is, named by {ENGINE})")


class Client:
    """A running call of the engine's program.

    Attributes:
        output: the first ``keep`` bytes of what it wrote so far.
        written: how many bytes it wrote so far.
    """

    def __init__(self, process: asyncio.subprocess.Process, keep: int, given: bytes | None) -> None:
        self._process, self._keep, self._given = process, keep, given
        self.output, self.errors, self.written = bytearray(), bytearray(), 0
        self._flood, self._news, self._is_over = asyncio.Event(), asyncio.Event(), False
        self._work = asyncio.create_task(self._talk())

    @classmethod
    async def start(
        cls,
        words: Sequence[str],
        *,
        keep: int,
        given: bytes | None = None,
        merged: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> "Client":
        """
        Args:
            keep: bytes of each stream.
            given: for its standard input.
            merged: standard error is read with standard output.
            env: in addition to this process's own.

        Raises:
            SandboxError: the words cannot be given to a program.
        """
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=nothing if given is None else pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.STDOUT if merged else pipe,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # too long, a zero byte, half a character
            raise SandboxError(f"ContainerSandbox: {words[0]}: {error!s:.300}") from error
        return cls(process, keep, given)

    async def _talk(self) -> None:
        streams = [(self._process.stdout, self.output), (self._process.stderr, self.errors)]
        await asyncio.gather(self._feed(), *(self._read(*pair) for pair in streams))
        self._is_over = True
        self._news.set()

    async def _feed(self) -> None:
        if (pipe := self._process.stdin) is None or self._given is None:
            return
        with contextlib.suppress(ConnectionError):
            for begin in range(0, len(self._given), _CHUNK):
                pipe.write(self._given[begin : begin + _CHUNK])
                await pipe.drain()
        pipe.close()

    async def _read(self, stream: asyncio.StreamReader | None, into: bytearray) -> None:
        while stream is not None and (chunk := await stream.read(_CHUNK)):
            self.written += len(chunk)
            into += chunk[: max(0, self._keep - len(into))]
            self._news.set()
            if self.is_flood:
                self._flood.set()

    @property
    def is_flood(self) -> bool:
        return self.written > FLOOD * self._keep

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def until_said(self, text: bytes, limit_s: float) -> None:
        """Waits until it has written this, or has closed its output.

        Raises:
            TimeoutError: neither came in time.
        """
        async with asyncio.timeout(limit_s):
            while text not in self.output and not self._is_over:
                self._news.clear()
                await self._news.wait()

    async def end(self, limit_s: float) -> int | None:
        """The exit code of the call; None if it has not ended in time, or writes without end."""
        flood = asyncio.create_task(self._flood.wait())
        try:
            await asyncio.wait(
                {self._work, flood}, timeout=max(0.0, limit_s), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            flood.cancel()
        return await self._code() if self._work.done() and not self.is_flood else None

    async def _code(self) -> int | None:
        self._work.result()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                return await self._process.wait()
        return None

    async def stop(self) -> None:
        """Ends the call with all of its session, unless it has ended; what it started in a container goes on.

        The program may be a script around another one, which would go on and hold the output open.
        """
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.wait({self._work}, timeout=_END_S)
        self._work.cancel()


async def call(
    words: Sequence[str], *, limit_s: float, keep: int = 1 << 20, given: bytes | None = None
) -> Said:
    """One call from start to end.

    Raises:
        SandboxError: it did not end in time.
    """
    client = await Client.start(words, keep=keep, given=given)
    try:
        code = await client.end(limit_s)
    finally:
        await client.stop()
    if code is None:
        raise SandboxError(f"ContainerSandbox: {' '.join(words[:3])}: no end within {limit_s:g} s")
    return Said(code, bytes(client.output), bytes(client.errors))
