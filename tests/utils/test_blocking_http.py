"""The HTTP client of threads, against a server that sends what a test has written."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from slime.utils import blocking_http
from slime.utils.blocking_http import BlockingClient
from tests.engines import free_port
from tests.utils.test_http_connection import ANSWERS, OK

SHORT = OK + b"Content-Length: 2\r\n\r\nok"
CLOSES = b""
"""In the place of an answer: the end of the connection."""


class Scripted:
    """Answers one request after the other with these bytes, over as many connections as are made."""

    def __init__(self) -> None:
        self.answers: list[list[bytes]] = []
        self.asked: list[bytes] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionResetError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := connection.recv(65536):
                self.asked.append(request)
                for piece in self.answers.pop(0):
                    if piece == CLOSES:
                        return
                    connection.sendall(piece)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def server() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


@pytest.fixture
def client(server: Scripted) -> Iterator[BlockingClient]:
    client = BlockingClient(server.url, timeout=120.0, headers={"X-Key": "k"})
    yield client
    client.close()


def test_a_request_is_one_packet_and_connections_are_kept(server, client):
    server.answers = [[SHORT], [SHORT]]
    answer = client.request("POST", "/path", content=b'{"a":1}', params={"b": "c d"})
    assert (answer.status_code, answer.text, answer.headers["content-length"]) == (200, "ok", "2")
    client.request("GET", server.url + "/whole")
    first, second = server.asked
    assert first.startswith(b"POST /path?b=c+d HTTP/1.1\r\n") and first.endswith(b'\r\n\r\n{"a":1}')
    assert b"X-Key: k\r\n" in first and b"Content-Length: 7\r\n" in first
    assert second.startswith(b"GET /whole HTTP/1.1\r\n") and server.connections == 1


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_however_it_is_cut(server, client, name):
    raw, body, keeps = ANSWERS[name]
    server.answers = [[raw[:cut], raw[cut:]] for cut in (1, len(raw) // 2, len(raw) - 1)]
    for _ in range(len(server.answers)):
        answer = client.request("GET", "/")
        assert answer.content == body and "t" not in answer.headers
    assert server.connections == (1 if keeps else 3)


def test_the_end_of_the_connection_ends_a_body_without_length(server, client):
    server.answers = [[OK + b"\r\nab", b"c", CLOSES]]
    assert client.request("GET", "/").content == b"abc"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([CLOSES], "disconnected before its answer was complete"),
        ([OK + b"Content-Length: 3\r\n\r\nab", CLOSES], "disconnected before its answer was complete"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n", CLOSES], "disconnected before its answer"),
        ([b"SSH-2.0-OpenSSH\r\n"], "not HTTP/1.1"),
        ([OK + b"A: b\r\n" * 20_000], "head of the answer has over 65536 bytes"),
        ([OK + b"Content-Length: 2\r\nContent-Encoding: br\r\n\r\nok"], "encoded as br"),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_its_connection_is_not_used_again(
    server, client, answer, said
):
    server.answers = [answer, [SHORT]]
    with pytest.raises(httpx.RemoteProtocolError, match=said):
        client.request("GET", "/")
    assert client.request("GET", "/").text == "ok" and server.connections == 2


@pytest.mark.parametrize("rest", [[CLOSES], [b"HTTP/1.1 200 OK\r\n"]])
def test_a_connection_that_the_server_has_ended_or_speaks_on_is_not_used_again(server, client, rest):
    server.answers = [[SHORT, *rest], [SHORT]]
    assert client.request("GET", "/").text == "ok"
    deadline = time.monotonic() + 120
    while client._idle and client._idle[0].is_fresh() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert client.request("GET", "/").text == "ok" and server.connections == 2


def test_an_answer_with_more_behind_it_is_one_and_its_connection_is_not_used_again(server, client):
    server.answers = [[SHORT + SHORT], [SHORT]]
    assert client.request("GET", "/").text == "ok" and not client._idle
    assert client.request("GET", "/").text == "ok" and server.connections == 2


def test_one_that_nobody_has_used_for_a_while_is_not_used_again(server, client, monkeypatch):
    server.answers = [[SHORT], [SHORT]]
    client.request("GET", "/")
    monkeypatch.setattr(blocking_http, "KEEPALIVE_S", 0.0)
    client.request("GET", "/")
    assert server.connections == 2


def test_who_does_not_answer_in_time_is_given_up(server, client):
    server.answers = [[], [SHORT]]
    with pytest.raises(httpx.ReadTimeout):
        client.request("GET", "/", timeout=0.05)
    assert client.request("GET", "/").text == "ok" and server.connections == 2


def test_nobody_at_the_address_and_what_is_no_address_are_told_apart():
    with pytest.raises(httpx.ConnectError):
        BlockingClient(f"http://127.0.0.1:{free_port()}", 120.0, {}).request("GET", "/")
    for url in ("ftp://host", "http://", "http://host:port"):
        with pytest.raises(httpx.UnsupportedProtocol):
            BlockingClient(url, 120.0, {}).request("GET", "/")


def test_a_server_without_a_certificate_gets_no_request(server):
    server.answers = [[SHORT]]
    with pytest.raises(httpx.ConnectError):
        BlockingClient(server.url.replace("http", "https"), 120.0, {}).request("POST", "/", content=b"x")
    assert b"POST" not in b"".join(server.asked)


def test_no_header_goes_that_ends_its_line(server):
    with pytest.raises(httpx.UnsupportedProtocol, match="end of a line"):
        BlockingClient(server.url, 120.0, {"X": "a\r\nY: b"}).request("GET", "/")
    assert server.connections == 0


def test_threads_have_connections_of_their_own(server, client):
    both = threading.Barrier(2)
    server.answers = [[SHORT]] * 2
    answer = server._answer

    def together(connection):
        both.wait(120)
        answer(connection)

    server._answer = together
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(client.request("GET", "/").text)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == ["ok", "ok"] and len(client._idle) == 2
    client.close()
    assert client.is_closed and not client._idle
