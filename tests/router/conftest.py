import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slime.router.router import SlimeRouter
from slime.router.serving import listening
from tests.engines import free_port
from tests.engines.fake import FakeEngine
from tests.router.bpe import byte_level
from tests.run_args import with_groups

LONGEST = 60.0
SETTINGS = {
    "sglang_router_ip": "127.0.0.1",
    "sglang_server_concurrency": 64,
    "rollout_num_engines": 2,
    "rollout_health_check_interval": 0.05,
    "rollout_health_check_timeout": 300.0,
    "use_slime_router": True,
    "slime_router_radix_tree_tokens": 100_000,
}


def router_args(**changes: Any) -> Namespace:
    return with_groups({**SETTINGS, "sglang_router_port": free_port(), **changes})


class Served:
    """A router that runs in this event loop, and a client of it."""

    def __init__(self, router: SlimeRouter, client: aiohttp.ClientSession, url: str) -> None:
        self.router, self.client, self.url = router, client, url

    async def add(self, *engines: FakeEngine) -> None:
        for engine in engines:
            async with self.client.post("/workers", json={"url": engine.url}) as answer:
                assert answer.status == 202, await answer.text()

    async def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
        async with self.client.post(path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(path) as answer:
            return answer.status, await answer.json(content_type=None)


@asynccontextmanager
async def served(**changes: Any) -> AsyncIterator[Served]:
    args = router_args(**changes)
    router = SlimeRouter(args)
    host, port = args.sglang_router_ip, args.sglang_router_port
    url = f"http://{host}:{port}"
    async with (
        router.running(),
        aiohttp.ClientSession(base_url=url) as client,
        listening(router.front, host, port),
    ):
        yield Served(router, client, url)


async def exchanged(router: Served, *pieces: bytes) -> bytes:
    """What the router sends on one connection until its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rpartition(":")[2]))
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    async with asyncio.timeout(LONGEST):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.fixture
def start_engine() -> Iterator[Callable[..., FakeEngine]]:
    """Starts fake engines that live until the test ends."""
    engines = []

    def start(api_key: str | None = None, port: int = 0) -> FakeEngine:
        engines.append(FakeEngine(api_key, port).start())
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but a tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    byte_level().save_pretrained(path)
    return path
