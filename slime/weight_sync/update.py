"""One weight update from begin to end."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import torch.distributed as dist

from slime.config.weight_update import WeightUpdateConfig
from slime.observability.spans import SpanList
from slime.training.weights import NamedTensors, Weights
from slime.utils.types import EngineEndpoint
from slime.weight_sync.agreement import RankAgreement, wait_limit
from slime.weight_sync.filters.filter import Filter
from slime.weight_sync.filters.format import ServedFormat
from slime.weight_sync.filters.pairs import WholePairs
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.report import SyncReport
from slime.weight_sync.transports import transports_of
from slime.weight_sync.transports.transport import Transport


class WeightUpdate:
    """Sends the current weights to every connected engine. All methods run on every trainer rank.

    Each engine is served by the first transport that accepts it.

    Args:
        transports: default those of `transports_of`.
        served: the checkpoint directory that the engines were started with, in whose format they get the
            weights; without one as they are.
        spans: takes the steps of each update, and what becomes of each bucket.
    """

    def __init__(
        self,
        config: WeightUpdateConfig,
        weights: Weights,
        transports: Sequence[Transport] | None = None,
        served: str | None = None,
        spans: SpanList | None = None,
    ) -> None:
        filters: list[Filter] = [WholePairs()]
        if served is not None:
            filters.append(ServedFormat(served))
        sync = config.weight_sync
        self._spans = SpanList() if spans is None else spans
        self._plan = WeightPlan(
            weights, filters, sync.update_weight_buffer_size, sync.check_weight_checksums, self._spans
        )
        self._transports = list(transports_of(config) if transports is None else transports)
        for transport in self._transports:
            transport.spans = self._spans
        self._serving: list[Transport] = []
        self._speeds: dict[Transport, float] = {}
        self._floor = 0.0
        self._ranks = RankAgreement(wait_limit(config.cluster))

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
        with self._ranks.step("connect engines"):
            remaining, self._serving = list(endpoints), []
            for transport in self._transports:
                served = [endpoint for endpoint in remaining if transport.accepts(endpoint)]
                remaining = [endpoint for endpoint in remaining if endpoint not in served]
                if served:
                    self._serving.append(transport)
                transport.connect(served)
            if remaining:
                raise ValueError(f"no transport reaches the engines {[e.url for e in remaining]}")
            for transport in self._serving:
                if transport not in self._speeds and dist.get_rank() in transport.source_ranks():
                    self._speeds[transport] = transport.path_speed()

    def run(self, version: int) -> SyncReport:
        """Gives every engine the current weights under the version ``str(version)``.

        After a failure the engines that are left stay paused; connect again before the next update.

        Raises:
            EngineError: an engine refused or did not answer in time.
            RuntimeError: another rank failed.
            ValueError: the engines' checkpoint has no place for a tensor.
        """
        sources: set[int] = set().union(*(transport.source_ranks() for transport in self._serving))
        sends = dist.get_rank() in sources
        self._floor = 0.0
        with self._step("pause engines and open the update"):
            if sends:
                _ = self._plan.manifest  # what cannot be sent is known before an engine stops
            for transport in self._serving:
                transport.open(str(version), self._plan)
        with self._step("send weights"):
            needed, start = bool(sources & self._plan.ranks), monotonic()
            sent = self._plan.carry(self._send if sends else None) if needed else 0
            transfer = monotonic() - start
        with self._step("close the update and continue"):
            for transport in self._serving:
                transport.commit()
            for transport in self._serving:
                transport.resume()
        pause = max((transport.pause for transport in self._serving), default=0.0)
        density = max((transport.density for transport in self._serving), default=0.0)
        return SyncReport(sent, transfer, pause, self._plan.rounding, density, self._floor)

    def disconnect(self) -> None:
        """Leaves all groups. It can be connected again."""
        with self._ranks.step("disconnect engines"):
            for transport in self._transports:
                transport.disconnect()

    def _send(self, bucket: NamedTensors, is_last: bool) -> int:
        sent = 0
        for transport in self._serving:
            carried = transport.send(bucket, is_last)
            self._floor += carried / self._speeds.get(transport, math.inf)
            sent += carried
        return sent

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        with self._spans.measure(name), self._ranks.step(name):
            yield
