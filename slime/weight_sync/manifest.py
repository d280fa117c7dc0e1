"""What an update consists of, and whether that is what was sent."""

from collections.abc import Iterable, Iterator

import torch

from slime.training.weights import NamedTensors, TensorInfo


class Manifest:
    """The tensors of an update by name.

    Raises:
        ValueError: two tensors have one name.
    """

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        for tensor in tensors:
            if tensor.name in self.tensors:
                raise ValueError(f"weight {tensor.name!r}: is in the update twice")
            self.tensors[tensor.name] = tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def checked(self, buckets: Iterable[NamedTensors]) -> Iterator[NamedTensors]:
        """Yields the same buckets, and looks at each of their tensors.

        Raises:
            RuntimeError: a tensor is another one than was announced, comes twice, or has not come at the end.
        """
        missing = dict(self.tensors)
        for bucket in buckets:
            for name, tensor in bucket:
                _require_equal(missing.pop(name, None), name, tensor)
            yield bucket
        if missing:
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise RuntimeError(f"weight {next(iter(missing))!r}{others}: not sent, but in the manifest")


def _require_equal(announced: TensorInfo | None, name: str, tensor: torch.Tensor) -> None:
    if announced is None:
        raise RuntimeError(f"weight {name!r}: sent twice, or not in the manifest")
    found, wanted = (tensor.dtype, tuple(tensor.shape)), (announced.dtype, announced.shape)
    if found != wanted:
        shown = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in (found, wanted)]
        raise RuntimeError(f"weight {name!r}: {shown[0]} (wanted: {shown[1]})")
