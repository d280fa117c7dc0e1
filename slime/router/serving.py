"""A server of the router in this process, from start to SIGTERM."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from slime.router.front import Front
from slime.router.http_server import ClientConnection
from slime.utils.async_utils import cancel_all

GRACE_S = 0.5
BACKLOG = 2048


@asynccontextmanager
async def listening(front: Front, host: str, port: int, *, shared: bool = False) -> AsyncIterator[None]:
    """Serves within the block.

    Args:
        shared: other processes listen on the same port, and the kernel spreads connections over them.
    """
    clients: set[ClientConnection] = set()
    server = await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(front.handle, clients),
        host,
        port,
        backlog=BACKLOG,
        reuse_port=shared or None,
    )
    try:
        yield
    finally:
        server.close()
        await _end(clients)


async def _end(clients: set[ClientConnection]) -> None:
    """Lets running requests finish for a moment."""
    running = [client.task for client in clients if client.task is not None]
    if running:
        await asyncio.wait(running, timeout=GRACE_S)
    for client in list(clients):
        client.abort()
    await cancel_all(running)


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
