"""Ports at which a jail listens for whoever made it, who connects to the same ports outside."""

import fcntl
import socket
import struct
from collections.abc import Sequence

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_INTERFACE = struct.Struct("16sH14x")
_BACKLOG = 128


def offer_ports(channel: int, ports: Sequence[int], apart: bool) -> str:
    """Listens on 127.0.0.1, and sends the sockets through ``channel``, a descriptor that it closes.

    Args:
        apart: whether this process has a network of its own.

    Returns:
        Why that is not possible; nothing if it is done.
    """
    with socket.socket(fileno=channel) as out:
        if not apart:
            return "no network of its own"
        try:
            _enable_loopback()
            listening = [socket.create_server(("127.0.0.1", port), backlog=_BACKLOG) for port in ports]
        except OSError as error:
            return str(error)
        socket.send_fds(out, [b" "], [one.fileno() for one in listening])
        for one in listening:
            one.close()
    return ""


def _enable_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, _INTERFACE.pack(b"lo", 0))
        _, flags = _INTERFACE.unpack(answer)
        fcntl.ioctl(any_socket, _SET_FLAGS, _INTERFACE.pack(b"lo", flags | _UP))
