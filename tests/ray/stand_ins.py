"""Engines, routers and clients of a fleet without processes."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from slime.backends.sglang_utils.client import EngineError
from slime.backends.sglang_utils.router import RouterError
from slime.ray.engine import Engine
from slime.ray.engine_group import EngineGroup
from slime.ray.served_model import ServedModel
from slime.utils.types import EngineEndpoint


class Cluster:
    """What all stand-ins of a test share; every rank serves at a fixed address.

    Attributes:
        requests: control requests, (url, name), in their order.
        dead: addresses that answer no request.
        ended: why a rank's process has ended.
        sick: what a health check of an address finds: False, an error, or what a function returns.
        hanging: until it is set, checks and looks of these ranks or addresses hang.
        hung: ranks and addresses that hang just now.
        checked: addresses whose health was checked.
        routed: addresses, by any router. A new one knows none.
        router_starts: why the next starts of a router fail; None for one that does not.
        told: which rank was told that it serves which version.
        taken: places that cannot be filled again yet.
        loads: requests of an address.
    """

    def __init__(self, colocated: bool = False) -> None:
        self.colocated = colocated
        self.requests: list[tuple[str, str]] = []
        self.dead: set[str] = set()
        self.versions: dict[str, str] = {}
        self.ended: dict[int, str] = {}
        self.stopped: list[int] = []
        self.told: list[tuple[int, str]] = []
        self.taken: set[int] = set()
        self.loads: dict[str, int] = {}
        self.sick: dict[str, Any] = {}
        self.hanging: dict[Any, threading.Event] = {}
        self.hung: list[Any] = []
        self.checked: list[str] = []
        self.routed: list[str] = []
        self.router_fails = False
        self.router_ended: str | None = None
        self.router_starts: list[str | None] = []
        self.on_register: Callable[[str], None] = lambda url: None

    def endpoint(self, rank: int) -> EngineEndpoint:
        return EngineEndpoint(f"http://engine{rank}", None, 1, rank if self.colocated else None)

    def hang(self, what: Any) -> None:
        if what in self.hanging:
            self.hung.append(what)
            self.hanging[what].wait(120)
            self.hung.remove(what)

    def model(self, places: int, name: str = "default", first_rank: int = 0, **options: Any) -> ServedModel:
        """One model with one group."""
        group = EngineGroup(Source(self, places), first_rank=first_rank)
        return ServedModel(name, [group], lambda: Router(self), **options)


class Handle:
    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        # A new process of the rank lives.
        cluster.ended.pop(rank, None)

    def failure_reason(self) -> str | None:
        self.cluster.hang(self.rank)
        return self.cluster.ended.get(self.rank)

    def processes(self) -> list[tuple[str, int]]:
        return [("node", 100 + self.rank)]

    def updated(self, version: str) -> None:
        self.cluster.told.append((self.rank, version))

    def end(self) -> None:
        self.cluster.stopped.append(self.rank)


class Source:
    def __init__(self, cluster: Cluster, places: int) -> None:
        self.cluster, self.places = cluster, places

    def __len__(self) -> int:
        return self.places

    def can_fill(self, place: int) -> bool:
        return place not in self.cluster.taken

    def launch(self, place: int, rank: int) -> Handle:
        return Handle(self.cluster, rank)

    def wait_ready(self, handles: Sequence[Handle], timeout: float) -> list[EngineEndpoint]:
        return [self.cluster.endpoint(handle.rank) for handle in handles]


class Router:
    url = "http://router"
    metrics_url: str | None = "http://router:9/metrics"

    def __init__(self, cluster: Cluster) -> None:
        if cluster.router_starts and (reason := cluster.router_starts.pop(0)):
            raise RouterError(reason)
        self.cluster = cluster
        cluster.router_ended = None
        cluster.routed.clear()

    def register_worker(self, url: str, kind: str = "regular") -> None:
        self.cluster.on_register(url)
        self._require_life()
        self.cluster.routed.append(url)

    def _require_life(self) -> None:
        if self.cluster.router_ended:
            raise RouterError("connection refused")

    def remove_worker(self, url: str) -> None:
        self._require_life()
        if self.cluster.router_fails:
            raise RouterError("the router is gone")
        if url in self.cluster.routed:
            self.cluster.routed.remove(url)

    def list_workers(self) -> list[dict[str, Any]]:
        return [{"url": url, "is_healthy": True} for url in self.cluster.routed]

    def is_alive(self) -> bool:
        return self.cluster.router_ended is None

    def failure_reason(self) -> str | None:
        return self.cluster.router_ended

    def shutdown(self) -> None:
        self.cluster.requests.append(("router", "shutdown"))


def client_class(cluster: Cluster) -> type:
    """In place of EngineClient."""

    class Client:
        def __init__(self, endpoint: EngineEndpoint, timeout: float) -> None:
            self.url, self.timeout = endpoint.url, timeout

        def _ask(self, name: str) -> None:
            if self.url in cluster.dead:
                raise EngineError(self.url, name, None, "connection refused")
            cluster.requests.append((self.url, name))

        def weight_version(self) -> str:
            self._ask("weight_version")
            return cluster.versions.get(self.url, "1")

        def release_memory_occupation(self) -> None:
            self._ask("release")

        def resume_memory_occupation(self, tags: list[str]) -> None:
            self._ask(f"resume {','.join(tags)}")

        def health(self, timeout: float) -> bool:
            cluster.checked.append(self.url)
            cluster.hang(self.url)
            found = cluster.sick.get(self.url, True)
            found = found() if callable(found) else found
            if isinstance(found, Exception):
                raise found
            return found

        def request(self, method: str, path: str, timeout: float, params: Any = None) -> Any:
            if path == "/v1/loads":
                self._ask("loads")
                requests = cluster.loads.get(self.url, 0)
                return {"loads": [{"num_running_reqs": requests, "num_waiting_reqs": 0}]}
            if not self.health(timeout):
                raise EngineError(self.url, path, None, "timed out")
            return None

    return Client


def ready_engine(cluster: Cluster, rank: int = 0) -> Engine:
    engine = Engine(rank, Handle(cluster, rank))
    engine.started(cluster.endpoint(rank))
    return engine


def wait_until(condition: Callable[[], Any], timeout: float = 60.0) -> None:
    pause = threading.Event()
    for _ in range(int(timeout / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"did not happen within {timeout:g} s")
