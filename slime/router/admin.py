"""What the router answers itself: registration, listings, health, metrics.

``/workers`` is as sglang-router has it, ``/add_worker``, ``/remove_worker`` and ``/list_workers`` as SGLang's
older router had them.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

import orjson

from slime.router.metrics import Counts, prometheus
from slime.router.pool import Worker, WorkerKind, WorkerPool, WorkerState
from slime.utils.worker_url import WANTED, spelling, worker_url

OPEN_PATHS = frozenset({"/health", "/liveness", "/readiness", "/metrics"})
"""Nobody needs a key for these, as on an engine."""
_OWN_PATHS = OPEN_PATHS | {"/workers", "/add_worker", "/remove_worker", "/list_workers"}


@dataclass(frozen=True)
class AdminRequest:
    """A request that is for the router itself."""

    method: str
    path: str
    query: Mapping[str, str]
    body: str


@dataclass(frozen=True)
class AdminAnswer:
    """An answer of the admin routes: text, or else JSON."""

    status: int
    body: Any

    @property
    def content_type(self) -> str:
        return "text/plain" if isinstance(self.body, str) else "application/json"

    @property
    def content(self) -> bytes:
        return self.body.encode() if isinstance(self.body, str) else orjson.dumps(self.body)


class AdminServer(Protocol):
    """Answers what ``is_own`` finds: `Admin`, or what asks one in another process."""

    async def answer(self, request: AdminRequest) -> AdminAnswer: ...


def is_own(path: str) -> bool:
    """Whether the router answers this path itself."""
    return path in _OWN_PATHS or path.startswith("/workers/")


class Admin:
    """Changes the pool as it is asked to.

    Args:
        check: asks a worker for its health and reports to the pool.
        spread: tells all processes of the router how the pool is now, and sums up in it what they count.
    """

    def __init__(
        self,
        pool: WorkerPool,
        counts: Counts,
        check: Callable[[Worker], Awaitable[None]],
        spread: Callable[[], Awaitable[None]],
    ) -> None:
        self._pool, self._counts, self._check, self._spread = pool, counts, check, spread

    async def answer(self, request: AdminRequest) -> AdminAnswer:
        if request.path.startswith("/workers/"):
            return await self._one(request.method, unquote(request.path.removeprefix("/workers/")))
        handlers = {
            ("GET", "/health"): self._health,
            ("GET", "/liveness"): self._health,
            ("GET", "/readiness"): self._readiness,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/workers"): self._list,
            ("POST", "/workers"): self._add,
            ("POST", "/add_worker"): self._add_old,
            ("POST", "/remove_worker"): self._remove_old,
            ("GET", "/list_workers"): self._list_old,
        }
        handler = handlers.get((request.method, request.path))
        if handler is None:
            return _error(405, "method_not_allowed", f"{request.method} {request.path} is not served")
        return await handler(request)

    async def _health(self, request: AdminRequest) -> AdminAnswer:
        return AdminAnswer(200, {"status": "ok"})

    async def _readiness(self, request: AdminRequest) -> AdminAnswer:
        healthy = sum(worker.state is WorkerState.SERVING for worker in self._pool)
        status = {"status": "ready" if healthy else "not ready", "healthy_workers": healthy}
        return AdminAnswer(200 if healthy else 503, {**status, "total_workers": len(self._pool)})

    async def _metrics(self, request: AdminRequest) -> AdminAnswer:
        await self._spread()
        return AdminAnswer(200, prometheus(self._counts, self._pool))

    async def _list(self, request: AdminRequest) -> AdminAnswer:
        await self._spread()
        workers = [_listed(worker) for worker in self._pool]
        return AdminAnswer(200, {"workers": workers, "total": len(workers)})

    async def _list_old(self, request: AdminRequest) -> AdminAnswer:
        return AdminAnswer(200, {"urls": [worker.url for worker in self._pool]})

    async def _add(self, request: AdminRequest) -> AdminAnswer:
        body = _object(request.body)
        kind = body.get("worker_type") or "regular"
        url = worker_url(body.get("url"))
        if url is None:
            return _error(400, "bad_worker", f"url is {body.get('url')!r} (wanted: {WANTED})")
        if kind not in list(WorkerKind):
            wanted = ", ".join(WorkerKind)
            return _error(400, "bad_worker", f"worker_type is {kind!r} (wanted: {wanted})")
        if (other := self._other_spelling(url) or self._other_kind(kind)) is not None:
            return other
        port = body.get("bootstrap_port")
        if port is not None and not (isinstance(port, int) and 0 < port < 2**16):
            return _error(400, "bad_worker", f"bootstrap_port is {port!r} (wanted: a port)")
        worker = await self._register(url, body.get("api_key"), WorkerKind(kind), port)
        location = f"/workers/{worker.id}"
        return AdminAnswer(202, {"status": "accepted", "worker_id": worker.id, "location": location})

    async def _add_old(self, request: AdminRequest) -> AdminAnswer:
        url = _url_in(request)
        if url is None:
            return _error(400, "bad_worker", f"no worker: give url, by query or as JSON (wanted: {WANTED})")
        if (other := self._other_spelling(url) or self._other_kind(WorkerKind.REGULAR)) is not None:
            return other
        await self._register(url, None)
        counts = {worker.url: worker.in_flight for worker in self._pool}
        return AdminAnswer(200, {"status": "success", "worker_urls": counts})

    async def _remove_old(self, request: AdminRequest) -> AdminAnswer:
        url = _url_in(request)
        if url is None:
            return _error(400, "bad_worker", f"no worker: give url, by query or as JSON (wanted: {WANTED})")
        self._pool.remove(url)
        await self._spread()
        return AdminAnswer(200, {"status": "success"})

    def _other_spelling(self, url: str) -> AdminAnswer | None:
        """A refusal, if the same worker is known by another address: it would get its share twice."""
        for worker in self._pool:
            if worker.url != url and spelling(worker.url) == spelling(url):
                return _error(400, "bad_worker", f"{url} is registered as {worker.url}")
        return None

    def _other_kind(self, kind: str) -> AdminAnswer | None:
        """A refusal, if one does halves of requests, and others that are here whole ones, or the reverse."""
        if not len(self._pool) or self._pool.has_halves == (kind != WorkerKind.REGULAR):
            return None
        found = ", ".join(sorted({worker.kind for worker in self._pool}))
        return _error(400, "bad_worker", f"worker_type is {kind!r}, and of others {found} (wanted: as they)")

    async def _register(
        self,
        url: str,
        api_key: str | None,
        kind: WorkerKind = WorkerKind.REGULAR,
        bootstrap_port: int | None = None,
    ) -> Worker:
        worker = self._pool.add(url, api_key, kind, bootstrap_port)
        if worker.state is not WorkerState.SERVING:
            await self._check(worker)
        await self._spread()
        return worker

    async def _one(self, method: str, worker_id: str) -> AdminAnswer:
        worker = self._pool.get(worker_id)
        if worker is None:
            return _error(404, "WORKER_NOT_FOUND", f"no worker {worker_id}")
        if method == "GET":
            return AdminAnswer(200, _listed(worker))
        if method != "DELETE":
            return _error(405, "method_not_allowed", f"{method} of a worker is not served")
        self._pool.remove(worker.url)
        await self._spread()
        return AdminAnswer(202, {"status": "accepted", "worker_id": worker.id})


def _listed(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.id,
        "url": worker.url,
        "worker_type": worker.kind.value,
        "bootstrap_port": worker.bootstrap_port,
        "is_healthy": worker.state is WorkerState.SERVING,
        "load": worker.in_flight,
        "state": worker.state.value,
        "reason": worker.reason,
        "weight_version": worker.version,
    }


def _error(status: int, kind: str, message: str) -> AdminAnswer:
    return AdminAnswer(status, {"error": {"type": kind, "code": kind, "message": message}})


def _object(body: str) -> dict[str, Any]:
    try:
        found = orjson.loads(body or "{}")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _url_in(request: AdminRequest) -> str | None:
    for source in (request.query, _object(request.body)):
        url = worker_url(source.get("url") or source.get("worker_url"))
        if url is not None:
            return url
    return None
