"""What changes weights between a trainer and a transport."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from slime.training.weights import NamedTensors, TensorInfo


class Filter(ABC):
    """One step on the way, on the ranks that send.

    Attributes:
        needs_session: whether engines have to be told when an update begins and ends.
    """

    needs_session = False

    def manifest(self, tensors: Iterable[TensorInfo]) -> Iterable[TensorInfo]:
        """What `apply` makes of these tensors; by default the same."""
        return tensors

    @abstractmethod
    def apply(self, buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        """Takes a bucket when the next one is asked of it, so that not more are in memory.

        Yields for each one that it takes at least one, empty if need be: whoever asks for one knows how many
        were taken, which other ranks take too.
        """
