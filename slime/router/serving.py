"""A server of the router in this process, from start to SIGTERM."""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from slime.router.front import Front
from slime.router.http_server import ClientConnection
from slime.utils.async_utils import cancel_all

GRACE_S = 0.5
BACKLOG = 2048
_AT_ONCE = 64
"""Connections that asyncio accepts before it looks at any of them."""
_OWN_DESCRIPTORS = 64
"""Descriptors of logs, health checks and the like."""


@asynccontextmanager
async def listening(front: Front, host: str, port: int, *, shared: bool = False) -> AsyncIterator[None]:
    """Serves within the block.

    Args:
        shared: other processes listen on the same port, and the kernel spreads connections over them.
    """
    clients: set[ClientConnection] = set()
    most = max_clients()
    server = await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(front.handle, clients, front.admits, most),
        host,
        port,
        # asyncio takes so many at once, and goes on with a line of log for each where it has no descriptor.
        backlog=_AT_ONCE,
        reuse_port=shared or None,
    )
    for listener in server.sockets:
        with socket.socket(fileno=os.dup(listener.fileno())) as same:
            same.listen(BACKLOG)
    try:
        yield
    finally:
        server.close()
        await _end(clients)


def max_clients() -> int:
    """Connections of clients that leave this process one more for each, to an engine, and its own."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = now
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return max(1, (most - _OWN_DESCRIPTORS - _AT_ONCE) // 2)


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
