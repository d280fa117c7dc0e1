"""What carries buckets of weights to engines."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from slime.backends.megatron_utils.update_weight.hf_weight_iterator import NamedTensors
from slime.utils.types import EngineEndpoint


class Sender(ABC):
    """One transport. All methods are called on every trainer rank, in the same order."""

    @abstractmethod
    def accepts(self, endpoint: EngineEndpoint) -> bool:
        """Whether this transport reaches the engine; the same answer on every rank."""

    @abstractmethod
    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Replaces the engines that this sender serves."""

    @abstractmethod
    def source_ranks(self) -> set[int]:
        """The trainer ranks whose weights are read; the same answer on every rank."""

    @abstractmethod
    def send(self, bucket: NamedTensors, version: str | None) -> int:
        """Carries full HF tensors to the engines; returns when they are loaded.

        Called on the source ranks and, where tensors are gathered with them, on their model-parallel peers.

        Args:
            version: with the last bucket, the weight version that the engines serve from now on.

        Returns:
            Bytes that this rank handed over.
        """

    @abstractmethod
    def disconnect(self) -> None:
        """Gives up process groups and connections."""
