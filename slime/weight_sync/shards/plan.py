"""An update of tensors of engine ranks."""

from collections.abc import Sequence
from typing import Protocol

from slime.observability.spans import SpanList
from slime.training.weights import Weights
from slime.utils.types import EngineEndpoint
from slime.weight_sync.plan import WeightPlan


class Shards(Weights, Protocol):
    """Weights as ranks of engines have them."""

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Decides who sends what to these engines. Collective on all trainer ranks."""

    def disconnect(self) -> None:
        """Forgets them. It can be connected again."""


class ShardPlan(WeightPlan):
    """What is sent depends on the engines, and is another thing on each trainer rank.

    Nothing changes it on its way: filters know the tensors of checkpoints.
    """

    def __init__(
        self, shards: Shards, max_bytes: int, notes_sent: bool = False, spans: SpanList | None = None
    ) -> None:
        super().__init__(shards, [], max_bytes, notes_sent, spans)
        self._shards = shards

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        self._shards.connect(endpoints)
        vars(self).pop("manifest", None)

    def disconnect(self) -> None:
        self._shards.disconnect()
