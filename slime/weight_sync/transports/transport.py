"""What carries buckets of weights to engines."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from slime.config.weight_update import WeightUpdateConfig
from slime.observability.spans import SpanList
from slime.training.weights import NamedTensors, ShardedWeights
from slime.utils.types import EngineEndpoint
from slime.weight_sync.agreement import RankAgreement
from slime.weight_sync.plan import WeightPlan
from slime.weight_sync.shards.plan import Shards


class Transport(ABC):
    """One way to engines, with what has to happen to them before the first bucket and after the last.

    All methods are called on every trainer rank, in the same order: connect; then for each update, if there
    are engines that it serves or it publishes: prepare, ..., open, send, send, ..., commit, resume; at last
    disconnect.

    Attributes:
        choice: the value of ``--update-weight-transport`` that it is for.
        pause: seconds for which its engines stood still in the last update, on the rank that told them so.
        commit_time: seconds of that in which one of them took weights in, as it told this rank; see
            `SyncReport`.
        density: which part of all bytes the last update had to send, on a rank that knows; else 0.
        buckets_at_once: how many of them it has on their way, which share the bytes of one.
        looks_ahead: whether it may prepare more than the first bucket.
        spans: for ``--trace``, in place of those of its own.
        agreement: of all trainer ranks.
        splits: whether it may give each trainer rank a part of the weights alone; no other serves then.
        publishes: whether it writes versions where there are no engines, too.
        writer: the trainer, by the name that engines are to know it by; None: they are told none.
    """

    choice = "nccl"
    pause = 0.0
    commit_time = 0.0
    density = 0.0
    buckets_at_once = 1
    looks_ahead = False
    splits = False
    publishes = False
    writer: str | None = None
    spans: SpanList
    agreement: RankAgreement

    @abstractmethod
    def __init__(self, config: WeightUpdateConfig) -> None: ...

    @classmethod
    def is_wanted(cls, config: WeightUpdateConfig) -> bool:
        """Whether a run with that choice uses it."""
        return True

    def shards_of(self, weights: ShardedWeights, timeout: timedelta) -> Shards | None:
        """What it carries instead of whole tensors; None for these."""
        return None

    def accepts(self, endpoint: EngineEndpoint) -> bool:
        """Whether this transport reaches the engine; the same answer on every rank."""
        return True

    @abstractmethod
    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Replaces the engines that this transport serves, and ends what a failed update has left open."""

    def take_over(self) -> None:
        """The engines have been sent weights by ranks that are gone, and an update may be open."""
        return

    def source_ranks(self) -> set[int]:
        """The trainer ranks whose weights are read; the same answer on every rank."""
        return {0}

    def own(self, plan: WeightPlan) -> WeightPlan:
        """What this rank is given of an update by a transport that `splits`. Collective on all ranks."""
        raise NotImplementedError

    def path_speed(self) -> float:
        """Bytes per second that its path carries at most, measured now; infinite where it is not known.

        Called on the source ranks when engines are connected.
        """
        return math.inf

    def prepare(self, bucket: NamedTensors, plan: WeightPlan) -> bool:
        """Does with the bucket that `send` is given first what can be done while all engines compute.

        Called on the source ranks, unless what the first bucket is depends on the second.

        Returns:
            Whether it needs the tensors no more: `send` is given them on the meta device, and the next bucket
            may be prepared as well.
        """
        return False

    @abstractmethod
    def open(self, version: str, plan: WeightPlan) -> None:
        """An update starts; ``version`` is what the engines serve once they have all of it."""

    @abstractmethod
    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        """Carries full HF tensors, or those of an engine's rank, away. Called on the source ranks.

        Returns:
            Bytes that this rank handed over.
        """

    @abstractmethod
    def settle(self) -> None:
        """This rank has been given all; waits until it is there. Called on the source ranks."""

    @abstractmethod
    def commit(self) -> None:
        """All ranks have sent all. When it returns the engines hold the new weights."""

    @abstractmethod
    def resume(self) -> None:
        """All engines of all transports hold the new weights, and may generate."""

    @abstractmethod
    def disconnect(self) -> None:
        """Gives up process groups and connections."""
