"""The session in which engines take weights: pause, flush, begin; the buckets; end, continue."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any, TypeVar

import torch.distributed as dist

from slime.backends.sglang_utils.client import EngineClient, EngineError
from slime.config.weight_update import WeightUpdateConfig
from slime.observability.spans import SpanList
from slime.utils.types import EngineEndpoint
from slime.weight_sync.agreement import answer_limit, wait_limit
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.proof import Digests
from slime.weight_sync.transports.transport import Transport
from slime.weight_sync.writer import HEADER

T = TypeVar("T")


CONFLICT = 409
"""The status with which an engine refuses a trainer in whose place another one has come."""
_STOPPED_S = 1.0  # no trainer takes another's place sooner


class WriterClient(EngineClient):
    """Says with each request which trainer asks, so that an engine can refuse one that has been replaced.

    SGLang cannot. There this client looks, before what changes or starts the engine, whether it still has the
    version that this trainer gave it, if nothing was asked for so long that another one may have come: a
    trainer that was stopped in between is found out, but for the one request that it was stopped at.

    Args:
        writer: the trainer; without one nothing is said or looked at.
        selector: the models of the engine that take weights.
    """

    def __init__(
        self, endpoint: EngineEndpoint, timeout: float, writer: str | None = None, selector: str = "all"
    ) -> None:
        super().__init__(endpoint, timeout=timeout)
        self.writer, self.selector = writer, selector
        self._given: str | None = None
        self._asked_at = -math.inf
        if writer is not None:
            self._headers.append((HEADER.encode(), writer.encode()))

    def request(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        self._asked_at = time.monotonic()
        return super().request(method, path, *arguments, **options)

    def take_weights(self) -> bool:
        """Has the engine take weights from this trainer alone, until another one takes them.

        Returns:
            Whether it had an update open, as far as it can tell, which is closed.

        Raises:
            EngineError: another trainer has come after this one.
        """
        if self.writer is None:
            return False
        try:
            answer = self.request("POST", "/take_weights", {"writer": self.writer})
        except EngineError as error:
            if error.status != 404:
                raise
            self._given = self.weight_version()
            return False
        return bool(answer["interrupted"])

    def has_given(self, version: str) -> None:
        """The engine has this version, whichever client has sent it."""
        if self._given is not None:
            self._given = version

    def require_own(self) -> None:
        """
        Raises:
            EngineError: somebody else has given the engine weights since, where it does not refuse that.
        """
        if self._given is None or time.monotonic() - self._asked_at < _STOPPED_S:
            return
        if (found := self.weight_version()) != self._given:
            wanted = f"{self._given!r}, which {self.writer} found there or gave it"
            told = f"weight version {found!r} (wanted: {wanted}): another trainer has taken its place"
            raise self._error("/model_info", CONFLICT, told)

    def pause_generation(self, mode: str = "abort") -> None:
        self.require_own()
        super().pause_generation(mode)

    def continue_generation(self) -> None:
        self.require_own()
        super().continue_generation()

    def update(self, path: str, body: dict[str, Any], version: str | None, flush: bool = False) -> None:
        self.require_own()
        super().update(path, body, version, flush)
        if version is not None:
            self.has_given(version)

    def update_weight_version(self, version: str) -> None:
        self.require_own()
        super().update_weight_version(version)
        self.has_given(version)


class EngineClients:
    """Clients of some engines. A request goes to all of them in parallel; each has the client's deadline."""

    def __init__(
        self,
        endpoints: Sequence[EngineEndpoint] = (),
        timeout_s: float = 0.0,
        writer: str | None = None,
        selector: str = "all",
    ) -> None:
        self.endpoints = list(endpoints)
        self.clients = [WriterClient(endpoint, timeout_s, writer, selector) for endpoint in endpoints]

    def each(self, request: Callable[[WriterClient], T]) -> list[T]:
        """Calls ``request`` with every client, and returns what it returns.

        Raises:
            EngineError: of the first engine, in the order of the endpoints, that failed.
        """
        if len(self.clients) < 2:
            return [request(client) for client in self.clients]
        with self._threads() as pool:
            futures = [pool.submit(request, client) for client in self.clients]
        return [future.result() for future in futures]

    def begin(self, request: Callable[[EngineClient], T]) -> "list[Future[T]]":
        """Calls ``request`` with every client in threads of their own, and does not wait."""
        if not self.clients:
            return []
        pool = self._threads()
        futures = [pool.submit(request, client) for client in self.clients]
        pool.shutdown(wait=False)
        return futures

    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(len(self.clients), thread_name_prefix="engine-control")

    def close(self) -> None:
        for client in self.clients:
            client.close()


class SessionTransport(Transport):
    """A transport whose engines stand still from before the first bucket until after the last.

    With ``--check-weight-update-equal`` they look whether the first update has brought back what they had
    loaded.
    """

    def __init__(self, config: WeightUpdateConfig) -> None:
        self.spans = SpanList()
        self._timeout, self._answer_limit = wait_limit(config.cluster), answer_limit(config)
        self._bucket_bytes = config.weight_sync.update_weight_buffer_size
        self._pause_mode = config.weight_sync.pause_generation_mode
        self._selector = config.weight_sync.update_weight_selector
        self._are_external = config.engines.rollout_external
        self._endpoints: list[EngineEndpoint] = []
        self._engines = EngineClients()  # of rank 0, which alone speaks of sessions
        self._check_pending = config.weight_sync.check_weight_update_equal
        self._is_open = False
        self._flushing: list[Future[None]] = []
        self._stopped_at = 0.0
        self._version = ""
        self._plan: WeightPlan | None = None

    @abstractmethod
    def _join(self) -> None:
        """Makes what carries buckets to the engines. Collective."""

    @abstractmethod
    def _leave(self) -> None:
        """Takes down what `_join` made. Collective."""

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """
        Raises:
            EngineError: an engine refused, or another trainer has come since.
        """
        with self.agreement.step("take engines"):  # or the other ranks would wait to meet them
            was_open = self._take(endpoints) or self._is_open
        self._join()
        # Somebody else's engine may have an update open that a run before this one was killed in.
        if self._is_open or self._are_external:
            was_open |= any(self._engines.each(self._end_interrupted))
        if was_open:
            self._check_pending = False  # what there was to compare with is gone
        self._is_open = False

    def _take(self, endpoints: Sequence[EngineEndpoint]) -> bool:
        """Leaves the engines before, and takes these; whether one had an update open."""
        self.disconnect()
        self._endpoints = list(endpoints)
        if dist.get_rank() == 0:
            self._engines = EngineClients(endpoints, self._answer_limit, self.writer, self._selector)
        return any(self._engines.each(lambda engine: engine.take_weights()))

    def take_over(self) -> None:
        self._check_pending = False  # the engines no longer have what they had loaded
        self._is_open = True

    def open(self, version: str, plan: WeightPlan) -> None:
        self._pause(version, plan)
        self._engines.each(lambda engine: engine.begin_weight_update())
        if plan.needs_session:
            self._engines.each(_require_session)

    def settle(self) -> None:
        return

    def commit(self) -> None:
        self._require_flushed()
        self._engines.each(lambda engine: engine.end_weight_update())
        self._compare()

    def _pause(self, version: str, plan: WeightPlan) -> None:
        """Has engines stand still, and drop what older weights have computed while they take newer ones."""
        self._engines.each(_connect)
        self._version, self._plan, self._is_open = version, plan, True
        self._stopped_at = monotonic()
        for engine in self._loaders:
            engine.commit_time = 0.0
        self._engines.each(lambda engine: engine.pause_generation(self._pause_mode))
        self._flushing = self._engines.begin(self._flush)
        if self._check_pending:
            self._engines.each(lambda engine: engine.weights_checker("reset_tensors"))

    @property
    def _loaders(self) -> list[WriterClient]:
        """Clients of this rank by which weights come to engines."""
        return self._engines.clients

    def _end_interrupted(self, engine: EngineClient) -> bool:
        """Ends the update that a failure left open; whether there was one.

        An engine that was started since then has none. It stands still until it has whole weights, also if
        somebody has let it continue.
        """
        engine.pause_generation(self._pause_mode)
        try:
            engine.end_weight_update()
        except EngineError as error:
            if error.status in (None, CONFLICT):
                raise
            return False
        return True

    def _flush(self, engine: EngineClient) -> None:
        if self._pause_mode == "in_place":
            engine.flush_idle_cache()  # refused where an answer goes on with what it holds
        else:
            engine.flush_cache()

    def _require_flushed(self) -> None:
        """
        Raises:
            EngineError: an engine holds yet what older weights have computed.
        """
        flushing, self._flushing = self._flushing, []
        for flushed in flushing:
            flushed.result()

    def _compare(self) -> None:
        if self._check_pending:
            self._engines.each(lambda engine: engine.weights_checker("compare"))
        if self._plan is not None and self._plan.sent is not None:
            self._require_held(self._plan, self._engines.clients)

    def _digests_of_all(self) -> list[Digests]:
        """What each rank has sent; nothing without ``--check-weight-checksums``. Collective."""
        if self._plan is None or self._plan.sent is None:
            return []
        return self.agreement.of_all("checksums of what was sent", self._plan.sent.digests)

    def _require_held(self, plan: WeightPlan, engines: Sequence[EngineClient]) -> None:
        """Holds what engines say that they have against what was sent; none on other ranks than 0."""
        assert plan.sent is not None
        plan.sent.require_held(engines, plan.weights())

    def resume(self) -> None:
        for engine in self._engines.clients:
            engine.has_given(self._version)  # some other rank may have sent it
        self._engines.each(lambda engine: engine.continue_generation())
        if self._engines.clients:
            self.pause = monotonic() - self._stopped_at
        self.commit_time = max((engine.commit_time for engine in self._loaders), default=0.0)
        self._check_pending = self._is_open = False

    def disconnect(self) -> None:
        self._leave()
        self._engines.close()
        self._endpoints, self._engines = [], EngineClients()


def _connect(engine: EngineClient) -> None:
    """Has an engine answer that still computes, so that a connection is there when it stops."""
    engine.model_info()


def _require_session(engine: EngineClient) -> None:
    if not engine.has_update_session:
        raise RuntimeError(
            f"engine {engine.endpoint.url}: has no /begin_weight_update, without which weights that it packs "
            "or lays out anew cannot be replaced (wanted: SGLang 0.5.23, or a checkpoint of another format)"
        )
