"""What carries buckets of weights to engines."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from slime.training.backend import NamedTensors
from slime.utils.types import EngineEndpoint


class Transport(ABC):
    """One way to engines. All methods are called on every trainer rank, in the same order.

    connect; then for each update: begin, send, send, ..., finish; at last disconnect.
    """

    @abstractmethod
    def accepts(self, endpoint: EngineEndpoint) -> bool:
        """Whether this transport reaches the engine; the same answer on every rank."""

    @abstractmethod
    def connect(self, endpoints: Sequence[EngineEndpoint]) -> None:
        """Replaces the engines that this transport serves."""

    @abstractmethod
    def source_ranks(self) -> set[int]:
        """The trainer ranks whose weights are read; the same answer on every rank."""

    @abstractmethod
    def begin(self, version: str) -> None:
        """An update starts; ``version`` is what the engines serve once they have its last bucket."""

    @abstractmethod
    def send(self, bucket: NamedTensors, is_last: bool) -> int:
        """Carries full HF tensors to the engines; returns when they are loaded.

        Called on the source ranks and, where tensors are gathered with them, on their model-parallel peers.

        Returns:
            Bytes that this rank handed over.
        """

    def finish(self) -> None:
        """The last bucket was sent; nothing to do where engines have loaded each one when they answer."""
        return

    @abstractmethod
    def disconnect(self) -> None:
        """Gives up process groups and connections."""
