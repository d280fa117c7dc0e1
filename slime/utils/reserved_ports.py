"""Ports at which this process listens before it tells of them, so that nobody else gets one meanwhile."""

import errno
import logging
import socket

logger = logging.getLogger(__name__)

_BACKLOG = 2048  # connections, as torch's own
_reserved: dict[tuple[str, int], socket.socket] = {}


def reserve_port(host: str) -> int:
    """A free port, at which this process listens until `listening_at` hands the listener over.

    If no interface of this machine has the address, which others may still reach it by, nothing listens.
    """
    listener = _listen(host, 0)
    if listener is None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]
    port: int = listener.getsockname()[1]
    _reserved[host.lower(), port] = listener
    return port


def listening_at(host: str, port: int) -> socket.socket | None:
    """A listener, which whoever gets it closes; None if no interface of this machine has the address.

    Raises:
        OSError: somebody else has the port.
    """
    listener = _reserved.pop((host.lower(), port), None) or _listen(host, port)
    if listener is None:
        logger.warning("%s is not an address of this machine: port %d listens on all interfaces", host, port)
    return listener


def _listen(host: str, port: int) -> socket.socket | None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None
    listener.listen(_BACKLOG)
    return listener
