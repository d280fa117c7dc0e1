"""A trainer's weights, held against what its manifest says of them."""

from collections.abc import Iterator

from slime.training.weights import NamedTensors, Weights
from slime.weight_sync.plan import Manifest


def announced(weights: Weights, max_bytes: int) -> Iterator[NamedTensors]:
    """The buckets; a tensor that is another than was announced, or is missing, raises."""
    tensors = weights.manifest()
    assert all(tensor.shard is None or tensor.shard[0] < len(tensor.shape) for tensor in tensors)
    return Manifest(tensors).checked(weights.buckets(max_bytes))
