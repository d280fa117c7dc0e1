"""The engines behind the router, its workers: which of them get requests, and which of those the next one."""

import hashlib
import logging
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from slime.router.prefixes import CacheAware, Prompt

logger = logging.getLogger(__name__)

UNREACHABLE_S = 1.0
"""How many seconds a worker that could not be connected to is the last choice."""


class WorkerState(StrEnum):
    """What a worker is good for.

    PENDING: registered, and has not answered yet. QUARANTINED: it stopped answering, and gets no request
    before it has newer weights.
    """

    PENDING = "pending"
    SERVING = "serving"
    QUARANTINED = "quarantined"


class WorkerKind(StrEnum):
    """What a worker does of a request: all of it, or one half."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(eq=False)
class Worker:
    """One engine.

    Attributes:
        api_key: that it asks for, if not the one of the router.
        bootstrap_port: of one that prefills: where it hands on what it has computed.
        reason: why it does not serve.
        failures: health checks in a row that it has failed.
        version: of its weights, as it said last; None if that is no number.
        stale_version: the newest one that any worker had when this one was quarantined.
        in_flight: requests that it works on, as far as this process knows.
    """

    url: str
    api_key: str | None = None
    kind: WorkerKind = WorkerKind.REGULAR
    bootstrap_port: int | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    state: WorkerState = WorkerState.PENDING
    reason: str = "has not answered yet"
    failures: int = 0
    version: int | None = None
    stale_version: int = -1
    in_flight: int = 0
    last_chosen: int = 0
    unreachable_until: float = 0.0


class WorkerPool:
    """All workers. It asks nobody anything: whoever does reports what was found.

    Args:
        failure_threshold: failed health checks in a row after which a worker is quarantined.
        prefixes: what workers have cached; None to choose by load alone.
    """

    def __init__(self, failure_threshold: int, prefixes: CacheAware | None = None) -> None:
        self._failure_threshold, self._prefixes = failure_threshold, prefixes
        self._workers: dict[str, Worker] = {}
        self._choices = 0

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str) -> Worker | None:
        """Returns a worker by its id or its URL."""
        return self._workers.get(worker_id) or next((w for w in self if worker_id == w.id), None)

    @property
    def has_halves(self) -> bool:
        """Whether requests are prefilled by one worker and decoded by another."""
        return any(worker.kind is not WorkerKind.REGULAR for worker in self)

    def add(
        self,
        url: str,
        api_key: str | None = None,
        kind: WorkerKind = WorkerKind.REGULAR,
        bootstrap_port: int | None = None,
    ) -> Worker:
        """Registers a worker. One that is quarantined starts anew: whoever registers it vouches for it."""
        known = self._workers.get(url)
        if known is not None and known.state is not WorkerState.QUARANTINED:
            return known
        if known is not None:
            self._emptied(known)
        self._workers[url] = Worker(url, api_key, kind, bootstrap_port)
        return self._workers[url]

    def remove(self, url: str) -> None:
        removed = self._workers.pop(url, None)
        if removed is not None:
            self._emptied(removed)

    def choose(
        self,
        session: str | None,
        tried: Collection[Worker] = (),
        kind: WorkerKind | None = None,
        prompt: Prompt | None = None,
    ) -> Worker | None:
        """The worker for the next request; None if none serves that was not tried.

        Requests of a session go to one worker, and when workers come or go only their sessions move. Others
        go where most of their prompt is cached, if that is known and loads are balanced; else to the worker
        with the fewest requests, of several to the one that was chosen longest ago.

        Args:
            kind: of the worker; any by default.
            prompt: that the worker will be sent.
        """
        serving = [w for w in self if w.state is WorkerState.SERVING and w not in tried]
        serving = [worker for worker in serving if kind in (None, worker.kind)]
        if not serving:
            return None
        now = time.monotonic()
        near = [worker for worker in serving if worker.unreachable_until <= now] or serving
        if session is not None:
            chosen = max(near, key=lambda worker: _weight(session, worker.url))
        else:
            by_turn = sorted(near, key=lambda worker: (worker.in_flight, worker.last_chosen))
            chosen = self._with_prefix(prompt, by_turn) or by_turn[0]
            self._choices += 1
            chosen.last_chosen = self._choices
        if self._prefixes is not None and prompt is not None:
            # Now, not with the answer: others with the same prompt are right behind.
            self._prefixes.sent(chosen.id, prompt)
        return chosen

    def refused(self, worker: Worker) -> None:
        """Sets a worker aside for a while: it could not be connected to."""
        worker.unreachable_until = time.monotonic() + UNREACHABLE_S
        self._emptied(worker)  # it never saw the prompt, and its process has probably ended

    def report(self, worker: Worker, failure: str | None, version: int | None) -> bool:
        """Takes in a health check; returns whether the worker serves now and did not before, or the reverse.

        Args:
            failure: why it is not well; None if it is.
        """
        served = worker.state is WorkerState.SERVING
        if failure is None:
            if version != worker.version:
                self._emptied(worker)
            worker.failures, worker.version = 0, version
            if worker.state is WorkerState.PENDING or self._is_refreshed(worker):
                worker.state, worker.reason = WorkerState.SERVING, ""
        else:
            worker.failures += 1
            if served and worker.failures >= self._failure_threshold:
                worker.state = WorkerState.QUARANTINED
                worker.stale_version = max(self._versions(), default=-1)
                self._emptied(worker)
                logger.warning("worker %s is quarantined: %s", worker.url, failure)
            if worker.state is not WorkerState.SERVING:
                worker.reason = failure
        return served != (worker.state is WorkerState.SERVING)

    def why_none(self) -> str:
        """Why no worker can be chosen."""
        if not self._workers:
            return "no worker is registered"
        kinds = {worker.kind for worker in self}
        if self.has_halves and (missing := {WorkerKind.PREFILL, WorkerKind.DECODE} - kinds):
            return f"no worker is registered that does the {'/'.join(sorted(missing))}"
        return "; ".join(
            f"{worker.url} is {worker.state.value}: {worker.reason}"
            if worker.state is not WorkerState.SERVING
            else f"{worker.url} refuses connections"
            for worker in self._workers.values()
        )

    def table(self) -> list[dict[str, Any]]:
        """What another process needs to know of each worker."""
        return [asdict(worker) for worker in self._workers.values()]

    def apply(self, table: list[dict[str, Any]]) -> None:
        """Takes over the table of another process; requests in flight are counted on."""
        old = {worker.id: worker for worker in self._workers.values()}
        self._workers = {}
        for row in table:
            place = row["url"], row["api_key"], WorkerKind(row["kind"]), row["bootstrap_port"], row["id"]
            worker = old.get(row["id"]) or Worker(*place)
            worker.state, worker.reason = WorkerState(row["state"]), row["reason"]
            if worker.state is not WorkerState.SERVING or worker.version != row["version"]:
                self._emptied(worker)
            worker.version = row["version"]
            self._workers[worker.url] = worker
        for worker in old.values():
            if self._workers.get(worker.url) is not worker:
                self._emptied(worker)

    def _with_prefix(self, prompt: Prompt | None, workers: list[Worker]) -> Worker | None:
        if self._prefixes is None or prompt is None:
            return None
        best = self._prefixes.choose(prompt, {worker.id: worker.in_flight for worker in workers})
        return None if best is None else self.get(best)

    def _emptied(self, worker: Worker) -> None:
        """What a worker has cached is gone, or counts no more."""
        if self._prefixes is not None:
            self._prefixes.forget(worker.id)

    def _is_refreshed(self, worker: Worker) -> bool:
        """Whether its weights are newer than any at its quarantine, and no older than those that serve."""
        if worker.version is None or worker.version <= worker.stale_version:
            return False
        serving = [w.version for w in self if w.state is WorkerState.SERVING and w.version is not None]
        return worker.version >= max(serving, default=-1)

    def _versions(self) -> list[int]:
        return [worker.version for worker in self._workers.values() if worker.version is not None]


def _weight(session: str, url: str) -> bytes:
    """Rendezvous hashing: the worker with the highest weight has the session."""
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
