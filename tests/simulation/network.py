"""HTTP between simulated processes: late, broken off, or without an answer."""

import itertools
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import httpcore
import httpx
import orjson

from slime.utils.http_client import Answer
from tests.simulation.kernel import Waiters, World

LATENCY = 0.002  # seconds on average of a request, and of its answer

Done = Callable[[int | None, Any], None]
"""Takes the status and the body of an answer; None and an error of httpx if there is none."""


class Server(Protocol):
    """A process that listens at an address."""

    alive: bool

    def handle(self, method: str, path: str, body: Any, done: Done) -> None:
        """Answers, now or later."""


class Network:
    """Who listens where.

    Attributes:
        loss: how likely the connection breaks after the server has done what was asked.
        delay: how likely a message takes some seconds.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.servers: dict[str, Server] = {}
        self.loss = self.delay = 0.0
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Server, Done]] = {}

    def latency(self) -> float:
        late = self.world.rng.uniform(0.5, 8.0) if self.world.rng.random() < self.delay else 0.0
        return late + self.world.rng.expovariate(1 / LATENCY)

    def call(self, method: str, url: str, body: Any, done: Done) -> Callable[[], None]:
        """Sends a request; returns what gives it up."""
        number = next(self._numbers)
        given_up: list[bool] = []
        parts = urlsplit(url)
        origin, path = f"{parts.scheme}://{parts.netloc}", parts.path
        if parts.query:
            body = {name: values[0] for name, values in parse_qs(parts.query).items()}

        server = self.servers.get(origin)  # another one at its address would not have this connection

        def arrive() -> None:
            if given_up:
                return
            if server is None or not server.alive:
                done(None, httpx.ConnectError(f"{method} {url}: connection refused"))
                return
            self._open[number] = server, done
            server.handle(method, path, body, answer)

        def answer(status: int | None, content: Any) -> None:
            if self._open.pop(number, None) is None:
                return
            if self.loss and self.world.rng.random() < self.loss:
                status, content = None, httpx.ReadError(f"{method} {url}: connection reset by peer")
            self.world.after(self.latency(), tell, status, content)

        def tell(status: int | None, content: Any) -> None:
            if not given_up:
                done(status, content)

        def give_up() -> None:
            given_up.append(True)
            self._open.pop(number, None)

        self.world.after(self.latency(), arrive)
        return give_up

    def break_off(self, server: Server) -> None:
        """Its process has ended, and with it all its connections."""
        for number, (other, done) in list(self._open.items()):
            if other is server:
                del self._open[number]
                self.world.after(self.latency(), done, None, httpx.ReadError("connection reset by peer"))


class Response:
    """What the product reads of an answer of httpx."""

    def __init__(self, status: int, body: Any) -> None:
        self.status_code, self._body = status, body
        self.headers = {"content-type": "application/json"}

    @property
    def content(self) -> bytes:
        return orjson.dumps(self._body)

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self) -> Any:
        return self._body


class EnginePool:
    """In place of ``httpcore.ConnectionPool``."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def request(
        self, method: str, url: str, headers: Any, content: bytes | None, extensions: dict[str, Any]
    ) -> httpcore.Response:
        client = Client(self._network, "", extensions["timeout"]["read"])
        try:
            found = client.request(method, url, content)
        except httpx.TransportError as error:
            raise getattr(httpcore, type(error).__name__)(str(error)) from error
        headers = list(found.headers.items())
        answer = httpcore.Response(found.status_code, headers=headers, content=found.content)
        answer.read()
        return answer

    def close(self) -> None:
        return


class Client:
    """In place of ``httpx.Client``."""

    def __init__(self, network: Network, base_url: str, timeout: float) -> None:
        self._network, self._base, self._timeout = network, base_url, timeout

    def request(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        json: Any = None,
        params: Any = None,
        timeout: float | None = None,
    ) -> Response:
        world, bell, answers = self._network.world, Waiters(), []
        body = orjson.loads(content) if content else json or params

        def done(status: int | None, found: Any) -> None:
            answers.append((status, found))
            world.wake_all(bell)

        url = self._base + path
        give_up = self._network.call(method, url, body, done)
        try:
            world.block(f"{method} {url}", self._timeout if timeout is None else timeout, bell)
        finally:
            give_up()
        if not answers:
            raise httpx.ReadTimeout(f"{method} {url}: timed out")
        status, found = answers[0]
        if status is None:
            raise found
        return Response(status, found)

    def get(self, path: str, timeout: float | None = None) -> Response:
        return self.request("GET", path, timeout=timeout)

    def close(self) -> None:
        return


async def send(
    network: Network, loop: Any, method: str, url: str, content: bytes | None, headers: Any
) -> Answer:
    """In place of `slime.utils.http_client.send`."""
    future = loop.create_future()

    def done(status: int | None, found: Any) -> None:
        loop.call_soon_threadsafe(_settle, future, status, found)

    give_up = network.call(method, url, orjson.loads(content) if content else None, done)
    try:
        status, body = await future
    finally:
        give_up()
    return Answer(status, "application/json", orjson.dumps(body))


def _settle(future: Any, status: int | None, found: Any) -> None:
    if future.done():
        return
    if status is None:
        future.set_exception(found)
    else:
        future.set_result((status, found))
