"""Weights in the format of the checkpoint that the engines serve."""

from slime.models.checkpoint.quantization import read_quantization
from slime.models.checkpoint.stored_format import StoredFormat
from slime.models.hf_config import HfConfig
from slime.training.backend import NamedTensors


class ServedFormat:
    """Quantises bucket by bucket, matrix by matrix, on the device of the trainer.

    Engines whose checkpoint is quantised know its tensors only: float8 and scales, or packed integers.

    Args:
        path: of the checkpoint; None for engines that are given the weights as they are.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._found = read_quantization(HfConfig.read(path)) if path is not None else None
        self._stored: StoredFormat | None = None

    @property
    def needs_session(self) -> bool:
        """Whether engines have to be told when an update begins and ends.

        SGLang packs 4-bit integers anew for its kernels, and undoes that in between only.
        """
        return self._found is not None and self._found.kind == "int4"

    def encode(self, bucket: NamedTensors) -> NamedTensors:
        """What the engines are to be given in the place of these tensors.

        The tensors that make up a weight stay together, as engines may compute with a weight as soon as it
        has come.

        Raises:
            ValueError: the checkpoint has no such weight, or one of another shape; or a number is not finite.
        """
        if self._found is None or self._path is None:
            return bucket
        if self._stored is None:  # on ranks that send alone
            self._stored = StoredFormat(self._path)
        # Wide formats first, so that each tensor of a flat bucket is aligned to its own.
        return sorted(self._stored.encode(bucket), key=lambda pair: -pair[1].dtype.itemsize)
