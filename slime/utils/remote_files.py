"""Fetches what a prompt names by URL, from hosts that ``--allowed-hosts`` lets it.

The address that was looked at is the one that is connected to: a name may resolve to another one a moment
later. Proxies of the environment are not asked, which would resolve the name themselves.
"""

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import httpx

from slime.utils.allowed_hosts import HostRefused, require_listed, require_public

MAX_BYTES = 64 * 1024 * 1024
TIMEOUT_S = 30.0
_MAX_REDIRECTS = 5
_BLOCK = 1 << 16


class FetchError(OSError):
    """What a URL names could not be fetched."""


def fetch(url: str, allowed_hosts: Sequence[str] | None, what: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """Returns what is at an ``http://`` or ``https://`` URL, redirects followed.

    Args:
        allowed_hosts: as ``--allowed-hosts`` has them; None for all at public addresses.
        what: names the URL in errors, without what may be secret.

    Raises:
        HostRefused: it, or what it redirects to, may not be fetched.
        FetchError: there is no such thing, it is too large, or comes too slowly.
    """
    deadline = time.monotonic() + timeout_s
    for _ in range(_MAX_REDIRECTS + 1):
        target = _parsed(url, what)
        try:
            with _connect(target, allowed_hosts, what, deadline) as connection, _cut_at(deadline, connection):
                content = _content_or_location(connection, target)
        except (OSError, http.client.HTTPException) as error:
            raise FetchError(f"{what}: {target.host}: {error}") from error
        if isinstance(content, bytes):
            return content
        url = str(target.join(content))
    raise FetchError(f"{what}: {target.host} redirects more than {_MAX_REDIRECTS} times")


def _parsed(url: str, what: str) -> httpx.URL:
    try:
        target = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise HostRefused(f"{what}: {error}") from error
    if target.scheme not in ("http", "https") or not target.host or target.userinfo:
        raise HostRefused(f"{what}: host {target.host or '(none)'} (wanted: http://HOST/..., without a user)")
    return target


def _connect(
    target: httpx.URL, allowed_hosts: Sequence[str] | None, what: str, deadline: float
) -> socket.socket:
    host, port = target.raw_host.decode("ascii"), _port(target)
    require_listed(str(target), allowed_hosts, what)
    addresses = [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if allowed_hosts is None:
        require_public(addresses, target.host, what)
    connection = _first_that_answers(addresses, port, deadline)
    if target.scheme == "http":
        return connection
    return ssl.create_default_context().wrap_socket(connection, server_hostname=host)


def _port(target: httpx.URL) -> int:
    return target.port or (443 if target.scheme == "https" else 80)


def _first_that_answers(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    *others, last = addresses
    for address in others:  # of IPv6 on a machine without it, say
        with suppress(OSError):
            return socket.create_connection((address, port), timeout=_left(deadline))
    return socket.create_connection((last, port), timeout=_left(deadline))


@contextmanager
def _cut_at(deadline: float, connection: socket.socket) -> Iterator[None]:
    """Ends a connection that brings a byte now and then, which no timeout of a socket does.

    Raises:
        TimeoutError: it was ended.
    """
    # Of the plain socket: that of TLS would take its state away from whoever reads.
    cut = threading.Timer(_left(deadline), socket.socket.shutdown, (connection, socket.SHUT_RDWR))
    cut.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        _left(deadline)
        raise
    finally:
        cut.cancel()
    _left(deadline)


def _content_or_location(connection: socket.socket, target: httpx.URL) -> bytes | str:
    client = http.client.HTTPConnection(target.raw_host.decode("ascii"), _port(target))
    client.sock = connection
    client.request("GET", target.raw_path.decode("ascii"), headers={"Accept-Encoding": "identity"})
    answer = client.getresponse()
    location = answer.getheader("Location")
    if answer.status in (301, 302, 303, 307, 308) and location:
        return location
    if answer.status != http.client.OK:
        raise FetchError(f"HTTP {answer.status}")
    content = answer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise FetchError(f"has over {MAX_BYTES} bytes")
    if answer.length:
        raise FetchError(f"was cut, {answer.length} bytes are missing")
    return content


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("takes too long")
    return left
