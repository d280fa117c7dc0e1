"""A small web server in a thread of this process, for agents that talk to it."""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.web_log import AccessLogger

LISTENS_ON = web.AppKey("listens_on", str)
"""The address that an application is served at."""


class FilteredAccessLogger(AccessLogger):
    """Writes no line for looks at its health."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.path != "/healthz":
            super().log(request, response, time)


@dataclass
class AppHandle:
    """A server that runs.

    Attributes:
        url: where it serves.
    """

    url: str
    port: int
    _loop: asyncio.AbstractEventLoop
    _thread: threading.Thread

    def stop(self, timeout: float = 10.0) -> None:
        """Ends it; calling it again does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout)


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 30.0,
    runner_kwargs: Mapping[str, Any] | None = None,
) -> AppHandle:
    """Serves an application in a thread with an event loop of its own; returns when it listens.

    Args:
        port: 0 for any that is free.
        runner_kwargs: of ``aiohttp.web.AppRunner``.

    Raises:
        OSError: the port is taken.
        TimeoutError: it did not start in time.
    """
    app[LISTENS_ON] = host
    loop, started = asyncio.new_event_loop(), threading.Event()
    outcome: list[int | BaseException] = []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(app, **(runner_kwargs or {}))
        try:
            await runner.setup()
            await web.TCPSite(runner, host, port).start()
            outcome.append(runner.addresses[0][1])
        except BaseException as error:
            outcome.append(error)
        started.set()
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        try:
            if isinstance(outcome[0], int):
                loop.run_forever()
        finally:
            loop.run_until_complete(runner.cleanup())
            loop.close()

    thread = threading.Thread(target=serve, name=thread_name, daemon=True)
    thread.start()
    if not started.wait(start_timeout_sec):
        raise TimeoutError(f"{thread_name}: not started after {start_timeout_sec:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return AppHandle(f"http://{host}:{outcome[0]}", outcome[0], loop, thread)
