"""An update of tensors of engine ranks."""

from collections.abc import Sequence

from slime.observability.spans import SpanList
from slime.utils.types import EngineEndpoint
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.shards.source import EngineShards


class ShardPlan(WeightPlan):
    """What is sent depends on the engines, and is another thing on each trainer rank.

    Nothing changes it on its way: filters know the tensors of checkpoints.
    """

    def __init__(
        self, shards: EngineShards, max_bytes: int, notes_sent: bool = False, spans: SpanList | None = None
    ) -> None:
        super().__init__(shards, [], max_bytes, notes_sent, spans)
        self._shards = shards

    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        self._shards.connect(endpoints)
        vars(self).pop("manifest", None)

    def disconnect(self) -> None:
        self._shards.disconnect()
