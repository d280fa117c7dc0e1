"""Weights in the format of the checkpoint that the engines serve."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from slime.models.checkpoint.quantization import read_quantization
from slime.models.checkpoint.stored_format import StoredFormat
from slime.models.hf_config import HfConfig
from slime.training.weights import NamedTensors, TensorInfo
from slime.weight_sync.filters.filter import Filter


class ServedFormat(Filter):
    """Quantises bucket by bucket, matrix by matrix, on the device of the trainer.

    Engines whose checkpoint is quantised know its tensors only: float8 and scales, or packed integers.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._found = read_quantization(HfConfig.read(path))
        # SGLang packs 4-bit integers anew for its kernels, and undoes that between begin and end only; scales
        # of MXFP8 it copies into the layout of its kernels at the end.
        self.needs_session = self._found is not None and self._found.is_laid_out_anew

    @cached_property
    def _stored(self) -> StoredFormat:  # read on ranks that send alone
        return StoredFormat(self._path)

    def manifest(self, tensors: Iterable[TensorInfo]) -> Iterable[TensorInfo]:
        """
        Raises:
            ValueError: the checkpoint has no such weight, or one of another shape.
        """
        if self._found is None:
            return tensors
        return [
            replace(tensor, name=name, dtype=dtype, shape=shape, shard=None)
            for tensor in tensors
            for name, (dtype, shape) in self._stored.encoded(
                tensor.name, (tensor.dtype, tensor.shape)
            ).items()
        ]

    def apply(self, buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        return iter(buckets) if self._found is None else map(self.encode, buckets)

    def encode(self, bucket: NamedTensors) -> NamedTensors:
        """What the engines are to be given in the place of these tensors.

        The tensors that make up a weight stay together, as engines may compute with a weight as soon as it
        has come.

        Raises:
            ValueError: the checkpoint has no such weight, or one of another shape; or a number is not finite.
        """
        # Wide formats first, so that each tensor of a flat bucket is aligned to its own.
        return sorted(self._stored.encode(bucket), key=lambda pair: -pair[1].dtype.itemsize)
