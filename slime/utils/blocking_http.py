"""An HTTP client of one server for threads that wait: a request is one packet, and httptools parses.

client = BlockingClient("http://127.0.0.1:30000", timeout=60.0, headers={})
client.request("POST", "/pause_generation", content=b"{}").status_code

Errors are httpx's. A small request of httpx's own client takes six times the CPU time, and goes as two
packets, for which the server wakes up twice. No proxy, no redirect, no HTTP/2; certificates are looked at.
"""

import select
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlencode

import httptools
import httpx

from slime.utils.http_client import Target, request_bytes
from slime.utils.http_connection import HEAD_BYTES
from slime.utils.http_pool import KEEPALIVE_S, Origin

_AT_ONCE = 2**16


@dataclass(frozen=True)
class BlockingAnswer:
    """A whole answer; the names of headers are in lower case."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


class BlockingClient:
    """Keeps connections between requests, which several threads may send.

    Args:
        base_url: of paths; a whole URL may stand in the place of a path.
        timeout: seconds without a byte of an answer after which a request is given up.
        headers: of each request.
    """

    def __init__(self, base_url: str, timeout: float, headers: Mapping[str, str]) -> None:
        self._base, self._timeout, self._headers = base_url.rstrip("/"), timeout, dict(headers)
        self._idle: list[_Connection] = []
        self.is_closed = False

    def request(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> BlockingAnswer:
        """Sends a GET or a POST, and returns the answer whatever its status.

        Raises:
            httpx.TransportError: there was none.
        """
        url = path if "://" in path else self._base + path
        limit = self._timeout if timeout is None else timeout
        try:
            target = Target.of(f"{url}?{urlencode(params)}" if params else url)
            request = request_bytes(method, target, content, self._headers)
        except (httpx.InvalidURL, ValueError) as error:
            raise httpx.UnsupportedProtocol(f"{method} {url}: {error}") from error
        connection = self._take(target.origin) or _Connection(target.origin, limit)
        try:
            answer = connection.ask(request, limit)
        except BaseException:
            connection.close()
            raise
        if connection.reusable and not self.is_closed:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _take(self, origin: Origin) -> "_Connection | None":
        """One that was used a moment ago, and that the server has not ended."""
        while self._idle:
            connection = self._idle.pop()
            if connection.origin == origin and connection.is_fresh():
                return connection
            connection.close()
        return None

    def close(self) -> None:
        self.is_closed = True
        while self._idle:
            self._idle.pop().close()


class _Connection:
    """Carries one request after the other."""

    def __init__(self, origin: Origin, timeout: float) -> None:
        self.origin = origin
        self._socket = _connected(origin, timeout)
        self._parser = httptools.HttpResponseParser(self)
        self._used = time.monotonic()
        self._asked = self.reusable = False
        self._clear()

    def _clear(self) -> None:
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._has_head = self._complete = False

    def is_fresh(self) -> bool:
        """Whether it can carry another request: a server that ends it makes it readable."""
        if time.monotonic() - self._used > KEEPALIVE_S:
            return False
        looked = select.poll()
        looked.register(self._socket, select.POLLIN)
        return not looked.poll(0)

    def ask(self, request: bytes, timeout: float) -> BlockingAnswer:
        self._clear()
        self._asked, self.reusable = True, False
        self._socket.settimeout(timeout)
        try:
            self._socket.sendall(request)
        except TimeoutError as error:
            raise httpx.WriteTimeout(f"{error}") from error
        except OSError as error:
            raise httpx.WriteError(f"{error}") from error
        self._read()
        self._used = time.monotonic()
        coding = self._headers.get("content-encoding", "identity")
        if coding != "identity":
            raise httpx.RemoteProtocolError(f"the answer is encoded as {coding} (wanted: identity)")
        return BlockingAnswer(self._status, self._headers, b"".join(self._parts))

    def _read(self) -> None:
        before_head = 0
        while not self._complete:
            try:
                data = self._socket.recv(_AT_ONCE)
            except TimeoutError as error:
                raise httpx.ReadTimeout(f"{error}") from error
            except OSError as error:
                raise httpx.ReadError(f"{error}") from error
            if not data:
                return self._end()
            before_head += 0 if self._has_head else len(data)
            try:
                self._parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                self.reusable = False
                if self._complete:  # what nobody asked for comes after it
                    return
                raise httpx.RemoteProtocolError(f"the answer is not HTTP/1.1: {error}") from error
            if not self._has_head and before_head > HEAD_BYTES:
                raise httpx.RemoteProtocolError(f"the head of the answer has over {HEAD_BYTES} bytes")

    def _end(self) -> None:
        """The end of the connection is that of an answer which does not say where it ends."""
        if not self._has_head or self._headers.keys() & {"content-length", "transfer-encoding"}:
            raise httpx.RemoteProtocolError("the server disconnected before its answer was complete")
        self._complete = True

    def close(self) -> None:
        self._socket.close()

    # What the parser finds.

    def on_message_begin(self) -> None:
        if not self._asked:
            raise ValueError("nothing was asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # a trailer must not pass for a header
            self._headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._has_head = self._status >= 200  # others say only that it goes on

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if not self._has_head:
            return self._clear()
        self.reusable = self._parser.should_keep_alive()
        self._complete, self._asked = True, False


def _connected(origin: Origin, timeout: float) -> socket.socket:
    try:
        plain = socket.create_connection((origin.host, origin.port), timeout=timeout)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Of a handshake that fails it closes the connection.
        return _tls().wrap_socket(plain, server_hostname=origin.host) if origin.secure else plain
    except TimeoutError as error:
        raise httpx.ConnectTimeout(f"{error}") from error
    except OSError as error:
        raise httpx.ConnectError(f"{error}") from error


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)
