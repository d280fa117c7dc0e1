"""Ports of this machine that code in a sandbox without a network reaches all the same.

The jail listens on 127.0.0.1 in its own network and gives its listening sockets to this process, which is in
the machine's network: it accepts there and connects here.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Connections through one port at a time; code inside cannot use up this process's file descriptors."""
_CHUNK = 1 << 16
_PAUSE_S = 0.1


class OpenPorts:
    """Passes connections on until it is closed.

    Args:
        channel: where the jail sends its listening sockets.
        ports: in the order in which they are sent.
    """

    def __init__(self, channel: socket.socket, ports: Sequence[int]) -> None:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, len(ports))
        self._listening = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        for one in self._listening:
            one.setblocking(False)
        pairs = zip(self._listening, ports, strict=True)
        self._tasks = [asyncio.create_task(_accept(*pair)) for pair in pairs]

    async def close(self) -> None:
        """Ends all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self._listening:
            one.close()


async def _accept(listening: socket.socket, port: int) -> None:
    free = asyncio.Semaphore(MAX_CONNECTIONS)
    async with asyncio.TaskGroup() as connections:
        while True:
            await free.acquire()
            try:
                inside, _ = await asyncio.get_running_loop().sock_accept(listening)
            except OSError as error:
                # Of a connection that has gone already, or for want of file descriptors.
                logger.warning("port %d of a sandbox: %s", port, error)
                free.release()
                await asyncio.sleep(_PAUSE_S)
                continue
            connections.create_task(_serve(inside, port, free))


async def _serve(inside: socket.socket, port: int, free: asyncio.Semaphore) -> None:
    writers: list[asyncio.StreamWriter] = []
    try:
        from_inside, to_inside = await asyncio.open_connection(sock=inside)
        writers.append(to_inside)
        from_here, to_here = await asyncio.open_connection("127.0.0.1", port)
        writers.append(to_here)
        await asyncio.gather(_copy(from_inside, to_here), _copy(from_here, to_inside))
    except OSError:
        pass  # either end has gone; the other one is told by the close
    finally:
        for writer in writers:
            writer.close()
        inside.close()
        free.release()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while chunk := await source.read(_CHUNK):
        target.write(chunk)
        await target.drain()
    with contextlib.suppress(OSError):
        target.write_eof()
