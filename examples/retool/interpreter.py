"""Python in a sandbox, a fresh process for each piece of code; files stay for the next piece."""

import asyncio
import os
from argparse import Namespace
from contextlib import AsyncExitStack
from functools import cache
from typing import Self
from weakref import WeakKeyDictionary

from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, Limits, LocalSandbox, SandboxError

_LONGEST_RESULT = 4000
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _processors() -> asyncio.Semaphore:
    """Returns an event loop's semaphore: its interpreters run as many programs as there are cores."""
    loop = asyncio.get_running_loop()
    if loop not in _semaphores:
        _semaphores[loop] = asyncio.Semaphore(os.cpu_count() or 1)
    return _semaphores[loop]


@cache
def _limits() -> Limits:
    return Limits(memory_bytes=1 << 30, processes=32, output_bytes=16 << 10)


class Interpreter:
    """One conversation's. Its sandbox opens with the first piece of code.

    ``args.retool_tool_seconds`` (30) bounds a piece of code; ``args.retool_allow_weaker_sandbox`` (False)
    runs it on machines that cannot hold a sandbox, for models that you trust. Both are keys of
    ``--custom-config-path``.
    """

    def __init__(self, args: Namespace) -> None:
        self._seconds = getattr(args, "retool_tool_seconds", 30)
        self._allow_weaker = getattr(args, "retool_allow_weaker_sandbox", False)
        self._stack = AsyncExitStack()
        self._sandbox: LocalSandbox | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def run(self, code: str) -> str:
        """What the code wrote, or how it failed.

        Raises:
            SandboxError: this machine cannot hold a sandbox.
        """
        async with _processors():
            if self._sandbox is None:
                self._sandbox = await self._stack.enter_async_context(
                    LocalSandbox(limits=_limits(), allow_weaker=self._allow_weaker)
                )
            try:
                await self._sandbox.write_file("code.py", code)
                exit_code, output = await self._sandbox.exec("python code.py", timeout=self._seconds)
            except SandboxError as error:  # code that took its sandbox with it
                await self._stack.aclose()
                self._sandbox = None
                return f"Error: {error}"
        if exit_code == EXIT_TIME_BUDGET_EXCEEDED:
            return f"Error: no end within {self._seconds:g} seconds"
        return output.strip()[-_LONGEST_RESULT:] or (
            "(no output)" if exit_code == 0 else f"exit code {exit_code}"
        )
