"""Asking workers whether they are well, again and again."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import orjson

from slime.router.pool import Worker, WorkerPool, WorkerState
from slime.router.settings import RouterSettings
from slime.utils.engine_meta import version_number
from slime.utils.http_utils import bearer_header

LOOK_AGAIN_S = 1.0
"""The pause between checks of a worker that does not serve: it may be ready by now, or have weights."""
_INFO_BYTES = 2**20


class HealthWatch:
    """Checks every worker, those that serve every ``--rollout-health-check-interval`` seconds.

    Args:
        changed: called when a worker begins or ceases to serve, or has other weights.

    Attributes:
        task: which checks; it ends only with an error.
    """

    def __init__(
        self, pool: WorkerPool, settings: RouterSettings, changed: Callable[[], Awaitable[None]]
    ) -> None:
        self._pool, self._settings, self._changed = pool, settings, changed
        # Decoded by nobody: aiohttp waits for ever on a body that ends before its compression does.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=settings.check_timeout),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
        )
        self.task = asyncio.create_task(self._run(), name="health checks")

    async def close(self) -> None:
        self.task.cancel()
        await self._session.close()

    async def check(self, worker: Worker) -> None:
        """One check; returns when the pool knows the result."""
        failure, version = await self._ask(worker)
        before = worker.version
        if self._pool.report(worker, failure, version) or worker.version != before:
            await self._changed()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due: dict[str, float] = {}
        while True:
            now = loop.time()
            workers = [worker for worker in self._pool if due.get(worker.id, 0.0) <= now]
            due = {worker.id: due.get(worker.id, 0.0) for worker in self._pool}
            await asyncio.gather(*map(self.check, workers))
            for worker in workers:
                due[worker.id] = loop.time() + self._pause(worker)
            await asyncio.sleep(min(LOOK_AGAIN_S, self._settings.check_interval))

    def _pause(self, worker: Worker) -> float:
        interval = self._settings.check_interval
        return interval if worker.state is WorkerState.SERVING else min(LOOK_AGAIN_S, interval)

    async def _ask(self, worker: Worker) -> tuple[str | None, int | None]:
        """Why it is not well, None if it is; and the version of its weights if that is a number."""
        headers = bearer_header(worker.api_key or self._settings.api_key)
        try:
            async with self._session.get(f"{worker.url}/health", headers=headers) as response:
                if response.status != 200:
                    return f"/health answers {response.status}", None
            async with self._session.get(f"{worker.url}/model_info", headers=headers) as response:
                info = await _beginning(response.content)
        # ValueError: a name that no resolver takes.
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}".rstrip(": "), None
        return None, _version(info)


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    """All of an answer of usual length, else so much of it that it is not JSON."""
    parts, left = [], _INFO_BYTES
    while left > 0 and (part := await content.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _version(answer: bytes) -> int | None:
    try:
        info = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    found = str(info.get("weight_version", "")) if isinstance(info, dict) else ""
    return version_number(found)
