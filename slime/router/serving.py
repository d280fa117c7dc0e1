"""A server of the router in this process, from start to SIGTERM."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from aiohttp import web

from slime.router.front import Front, http_server

GRACE_S = 0.5
BACKLOG = 2048


@asynccontextmanager
async def listening(front: Front, host: str, port: int, *, shared: bool = False) -> AsyncIterator[None]:
    """Serves within the block.

    Args:
        shared: other processes listen on the same port, and the kernel spreads connections over them.
    """
    runner = web.ServerRunner(http_server(front), shutdown_timeout=GRACE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG, reuse_port=shared or None).start()
        yield
    finally:
        await runner.cleanup()


def stop_signal() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def until_first(*ends: Awaitable[object]) -> None:
    """Returns when one of them ends; raises what it raised."""
    tasks = [asyncio.ensure_future(end) for end in ends]
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    for task in done:
        task.result()
