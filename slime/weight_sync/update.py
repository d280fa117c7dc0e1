"""One weight update from begin to end."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import NamedTuple, cast

import torch.distributed as dist

from slime.config.lora import SERVED_ADAPTER, LoraConfig
from slime.config.weight_update import WeightUpdateConfig
from slime.observability.spans import SpanList
from slime.training.weights import NamedTensors, ShardedWeights, Weights
from slime.utils.types import EngineEndpoint
from slime.weight_sync.agreement import RankAgreement, wait_limit
from slime.weight_sync.filters.filter import Filter
from slime.weight_sync.filters.format import ServedFormat
from slime.weight_sync.filters.pairs import WholePairs
from slime.weight_sync.plan import Passage, WeightPlan
from slime.weight_sync.report import SyncReport
from slime.weight_sync.shards.plan import ShardPlan
from slime.weight_sync.transports import transports_of
from slime.weight_sync.transports.adapters import AdapterTransport
from slime.weight_sync.transports.transport import Transport
from slime.weight_sync.writer import new_writer

Step = Callable[[str], AbstractContextManager[None]]


class AdapterWeights(NamedTuple):
    """An adapter that engines get beside the base, under the name that requests have for it."""

    weights: Weights
    config: LoraConfig
    name: str = SERVED_ADAPTER


class Route:
    """A form of weights on its way. Each engine is served by the first transport that accepts it.

    Attributes:
        serving: transports that have engines, or publish without.
        floor: seconds that the path of what was sent since `open` takes at least, where that is known.
    """

    def __init__(self, plan: WeightPlan, transports: Sequence[Transport]) -> None:
        self.plan, self.transports = plan, list(transports)
        self.serving: list[Transport] = []
        self.floor = 0.0
        self._speeds: dict[Transport, float] = {}
        self._passage: Passage | None = None

    @property
    def sources(self) -> set[int]:
        """The trainer ranks whose weights are read."""
        return set().union(*(transport.source_ranks() for transport in self.serving))

    @property
    def density(self) -> float:
        """Which part of all bytes had to be sent; see `SyncReport`."""
        return max((transport.density for transport in self.serving), default=0.0)

    @property
    def sends(self) -> bool:
        """Whether this rank is one of them."""
        return dist.get_rank() in self.sources

    def connect(self, endpoints: Sequence[EngineEndpoint], step: Step) -> None:
        """
        Args:
            step: what fails on a rank alone fails on all in one, before others meet in the next transport.

        Raises:
            ValueError: no transport reaches an engine, or the plan cannot do with one.
        """
        remaining, self.serving, self._passage = list(endpoints), [], None
        with step("take note of engines"):
            self.plan.connect(endpoints)
        for transport in self.transports:
            served = [endpoint for endpoint in remaining if transport.accepts(endpoint)]
            remaining = [endpoint for endpoint in remaining if endpoint not in served]
            if served or transport.publishes:
                self.serving.append(transport)
            with step("connect engines"):
                transport.connect(served)
        if remaining:
            raise ValueError(f"no transport reaches the engines {[e.url for e in remaining]}")
        with step("measure paths to engines"):
            for transport in self.serving:
                if transport not in self._speeds and dist.get_rank() in transport.source_ranks():
                    self._speeds[transport] = transport.path_speed()

    @property
    def looks_ahead(self) -> bool:
        """Whether more than one bucket may be prepared; the same on every rank."""
        return bool(self.serving) and all(transport.looks_ahead for transport in self.serving)

    @property
    def may_prepare(self) -> bool:
        """Whether this rank has another bucket prepared before engines stand still."""
        return self._passage is not None and self._passage.may_prepare

    def prepare(self) -> None:
        """Gets the first bucket ready while engines compute."""
        self.floor = 0.0
        plan = self.plan
        for transport in self.serving:
            if transport.splits:  # and says then which ranks are sources
                plan = transport.own(plan)
        if self.sources & plan.ranks:
            parts = max(transport.buckets_at_once for transport in self.serving)
            self._passage = plan.begin(self._prepare if self.sends else None, parts)

    def prepare_next(self) -> None:
        """Gets another one ready."""
        if self._passage is not None:
            self._passage.prepare_next()

    def _prepare(self, bucket: NamedTensors) -> bool:
        looks_on = [transport.prepare(bucket, self.plan) for transport in self.serving]
        return all(looks_on)

    def open(self, version: str) -> None:
        for transport in self.serving:
            transport.open(version, self.plan)

    def carry(self) -> int:
        """Gathers and sends; returns the bytes that this rank handed over."""
        passage, self._passage = self._passage, None
        sent = 0 if passage is None else passage.carry(self._send if self.sends else None)
        for transport in self.serving if self.sends else ():
            transport.settle()
        return sent

    def _send(self, bucket: NamedTensors, is_last: bool) -> int:
        sent = 0
        for transport in self.serving:
            carried = transport.send(bucket, is_last)
            self.floor += carried / self._speeds.get(transport, math.inf)
            sent += carried
        return sent

    def commit(self) -> None:
        for transport in self.serving:
            transport.commit()

    def resume(self) -> None:
        for transport in self.serving:
            transport.resume()


class WeightUpdate:
    """Sends the current weights to every connected engine. All methods run on every trainer rank.

    Engines, and the directory of versions, know its ranks by a name of their own: what they still send when
    another one has connected is refused.

    Args:
        weights: all that the engines are to hold; beside adapters the base, which is sent once after each
            `connect`, as nothing trains it.
        transports: default those of `transports_of`.
        served: the checkpoint directory that the engines were started with, in whose format they get the
            weights; without one as they are.
        spans: takes the steps of each update, and what becomes of each bucket.
        adapters: sent in each update.
        writer: by which engines and directories know its ranks, a new name by default. Updates in turns with
            the same engines have one.
    """

    def __init__(
        self,
        config: WeightUpdateConfig,
        weights: Weights,
        transports: Sequence[Transport] | None = None,
        served: str | None = None,
        spans: SpanList | None = None,
        adapters: Sequence[AdapterWeights] = (),
        writer: str | None = None,
    ) -> None:
        filters: list[Filter] = [WholePairs()]
        if served is not None:
            filters.append(ServedFormat(served))
        sync = config.weight_sync
        size = sync.update_weight_buffer_size
        self._spans = SpanList() if spans is None else spans
        transports = transports_of(config) if transports is None else transports
        notes, spans = sync.check_weight_checksums, self._spans
        timeout, sharded = wait_limit(config.cluster), cast(ShardedWeights, weights)
        shards = next(filter(None, (each.shards_of(sharded, timeout) for each in transports)), None)
        if shards is not None:
            plan: WeightPlan = ShardPlan(shards, size, notes, spans)
        else:
            plan = WeightPlan(weights, filters, size, notes, spans)
        self._routes = [Route(plan, transports)]
        for one in adapters:
            beside = WeightPlan(one.weights, [], size, spans=self._spans)
            self._routes.append(Route(beside, [AdapterTransport(config, one.config, plan, one.name)]))
        self._has_base = False
        self._ranks = RankAgreement(timeout)
        writer = self._ranks.of_first("name of the trainer", writer or new_writer())
        for transport in self._transports:
            transport.spans, transport.writer, transport.agreement = self._spans, writer, self._ranks

    @property
    def _transports(self) -> list[Transport]:
        return [transport for route in self._routes for transport in route.transports]

    def take_over(self) -> None:
        """Tells, before the first `connect`, that ranks that are gone have sent the engines weights."""
        for transport in self._transports:
            transport.take_over()

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Replaces the engines to be updated. ``endpoints`` must be the same on every rank.

        Raises:
            EngineError: an engine refused.
            RuntimeError: a group did not form in time, or another rank failed.
        """
        self._has_base = False
        for route in self._routes:
            route.connect(endpoints, self._ranks.step)

    def run(self, version: int) -> SyncReport:
        """Gives every engine the current weights under the version ``str(version)``.

        After a failure the engines that are left stay paused; connect again before the next update.

        Raises:
            EngineError: an engine refused or did not answer in time.
            RuntimeError: another rank failed.
            ValueError: the engines' checkpoint has no place for a tensor.
        """
        routes = self._routes[self._has_base :]
        sent, transfer = 0, 0.0
        for route in routes:
            with self._step("prepare the first bucket"):
                start = monotonic()
                route.prepare()
                transfer += monotonic() - start
            while route.looks_ahead and self._ranks.any_rank("prepare another bucket", route.may_prepare):
                with self._step("prepare another bucket"):
                    start = monotonic()
                    route.prepare_next()
                    transfer += monotonic() - start
            with self._step("pause engines and open the update"):
                route.open(str(version))
            with self._step("send weights"):
                start = monotonic()
                sent += route.carry()
                transfer += monotonic() - start
            if route is not routes[-1]:
                with self._step("close a part of the update"):
                    route.commit()
        with self._step("close the update and continue"):
            routes[-1].commit()
            for route in routes:
                route.resume()
        self._has_base = len(self._routes) > 1
        serving = [transport for route in routes for transport in route.serving]
        return SyncReport(
            sent,
            transfer,
            pause=max((transport.pause for transport in serving), default=0.0),
            rounding=self._routes[0].plan.rounding,
            density=sum(route.density for route in routes),
            floor=sum(route.floor for route in routes),
            commit=max((transport.commit_time for transport in serving), default=0.0),
        )

    def disconnect(self) -> None:
        """Leaves all groups. It can be connected again."""
        with self._ranks.step("disconnect engines"):
            for transport in self._transports:
                transport.disconnect()
            for route in self._routes:
                route.plan.disconnect()

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        with self._spans.measure(name), self._ranks.step(name):
            yield
