"""A form of weights on its way: what there is of it, and the transports that carry it."""

import math
from collections.abc import Sequence

import torch.distributed as dist

from slime.training.weights import NamedTensors
from slime.utils.types import EngineEndpoint
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.transports.transport import Transport


class Route:
    """Each engine is served by the first transport that accepts it.

    Attributes:
        serving: transports that have engines.
        floor: seconds that the path of what was sent since `open` takes at least, where that is known.
    """

    def __init__(self, plan: WeightPlan, transports: Sequence[Transport]) -> None:
        self.plan, self.transports = plan, list(transports)
        self.serving: list[Transport] = []
        self.floor = 0.0
        self._speeds: dict[Transport, float] = {}

    @property
    def sources(self) -> set[int]:
        """The trainer ranks whose weights are read."""
        return set().union(*(transport.source_ranks() for transport in self.serving))

    @property
    def sends(self) -> bool:
        """Whether this rank is one of them."""
        return dist.get_rank() in self.sources

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """
        Raises:
            ValueError: no transport reaches an engine.
        """
        remaining, self.serving = list(endpoints), []
        for transport in self.transports:
            served = [endpoint for endpoint in remaining if transport.accepts(endpoint)]
            remaining = [endpoint for endpoint in remaining if endpoint not in served]
            if served:
                self.serving.append(transport)
            transport.connect(served)
        if remaining:
            raise ValueError(f"no transport reaches the engines {[e.url for e in remaining]}")
        for transport in self.serving:
            if transport not in self._speeds and dist.get_rank() in transport.source_ranks():
                self._speeds[transport] = transport.path_speed()

    def open(self, version: str) -> None:
        self.floor = 0.0
        if self.sends:
            _ = self.plan.manifest  # what cannot be sent is known before an engine stops
        for transport in self.serving:
            transport.open(version, self.plan)

    def carry(self) -> int:
        """Gathers and sends; returns the bytes that this rank handed over."""
        if not self.sources & self.plan.ranks:
            return 0
        return self.plan.carry(self._send if self.sends else None)

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
