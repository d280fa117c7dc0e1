"""One weight update from begin to end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

from slime.config.lora import LoraConfig
from slime.config.weight_update import WeightUpdateConfig
from slime.observability.spans import SpanList
from slime.training.weights import Weights
from slime.utils.types import EngineEndpoint
from slime.weight_sync.agreement import RankAgreement, wait_limit
from slime.weight_sync.filters.filter import Filter
from slime.weight_sync.filters.format import ServedFormat
from slime.weight_sync.filters.pairs import WholePairs
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.report import SyncReport
from slime.weight_sync.route import Route
from slime.weight_sync.transports import transports_of
from slime.weight_sync.transports.adapters import AdapterTransport
from slime.weight_sync.transports.transport import Transport


class AdapterWeights(NamedTuple):
    """Adapters that engines get beside the base."""

    weights: Weights
    config: LoraConfig


class WeightUpdate:
    """Sends the current weights to every connected engine. All methods run on every trainer rank.

    Args:
        weights: all that the engines are to hold; beside adapters the base, which is sent once after each
            `connect`, as nothing trains it.
        transports: default those of `transports_of`.
        served: the checkpoint directory that the engines were started with, in whose format they get the
            weights; without one as they are.
        spans: takes the steps of each update, and what becomes of each bucket.
        adapters: sent in each update.
    """

    def __init__(
        self,
        config: WeightUpdateConfig,
        weights: Weights,
        transports: Sequence[Transport] | None = None,
        served: str | None = None,
        spans: SpanList | None = None,
        adapters: AdapterWeights | None = None,
    ) -> None:
        filters: list[Filter] = [WholePairs()]
        if served is not None:
            filters.append(ServedFormat(served))
        sync = config.weight_sync
        size = sync.update_weight_buffer_size
        self._spans = SpanList() if spans is None else spans
        plan = WeightPlan(weights, filters, size, sync.check_weight_checksums, self._spans)
        self._routes = [Route(plan, transports_of(config) if transports is None else transports)]
        if adapters is not None:
            beside = WeightPlan(adapters.weights, [], size, spans=self._spans)
            self._routes.append(Route(beside, [AdapterTransport(config, adapters.config, plan)]))
        for transport in self._transports:
            transport.spans = self._spans
        self._has_base = False
        self._ranks = RankAgreement(wait_limit(config.cluster))

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
        with self._ranks.step("connect engines"):
            for route in self._routes:
                route.connect(endpoints)

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
            with self._step("pause engines and open the update"):
                route.open(str(version))
            with self._step("send weights"):
                start = monotonic()
                sent += route.carry()
                transfer += monotonic() - start
            if route is not routes[-1]:
                with self._step("close the update of the base"):
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
            density=max((transport.density for transport in serving), default=0.0),
            floor=sum(route.floor for route in routes),
        )

    def disconnect(self) -> None:
        """Leaves all groups. It can be connected again."""
        with self._ranks.step("disconnect engines"):
            for transport in self._transports:
                transport.disconnect()

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        with self._spans.measure(name), self._ranks.step(name):
            yield
