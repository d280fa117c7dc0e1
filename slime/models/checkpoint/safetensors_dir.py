"""Reads tensors, or parts of them, by name from the safetensors files of a checkpoint directory."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import safe_open

from slime.models.checkpoint.safetensors_index import SafetensorIndex
from slime.models.checkpoint.tensor_slices import TensorSlices

# Pages of mapped files count as memory of the process until the mappings end.
_MAPPED_BYTES = 32 * 1024**2
# Those of weights, by their names in headers; others are seen from what is read.
_DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn},
    **{"I32": torch.int32, "I64": torch.int64, "U8": torch.uint8},
}


class TensorReader(Protocol):
    """What loaders ask of a checkpoint: see `SafetensorReader`, which has its tensors as they are stored."""

    path: Path

    def names(self) -> list[str]: ...
    def file_of(self, name: str) -> str: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def read(self, name: str) -> torch.Tensor: ...
    def read_part(self, name: str, box: Sequence[slice]) -> torch.Tensor: ...
    def copy_rows(self, target: torch.Tensor, name: str, rows: range, columns: Sequence[slice]) -> None: ...


class SafetensorReader(SafetensorIndex):
    """``with SafetensorReader(path) as reader: reader.read(name)``. Files are opened when first needed.

    Raises:
        ValueError: the directory has no safetensors files, its index names a missing file, or a file cannot
            be read.
    """

    framework = "pt"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._given: dict[Path, int] = {}
        self._rows: dict[Path, TensorSlices] = {}
        self._formats: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for rows in self._rows.values():
            rows.close()
        self._rows.clear()

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors one by one, so that only one is in memory beside the model."""
        return ((name, self.read(name)) for name in self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name`` on the CPU, as it is stored.

        Raises:
            ValueError: the checkpoint has no such tensor.
        """
        whole = self._holder(name).get_tensor(name)
        return self._given_out(name, whole, whole.nbytes)

    def read_part(self, name: str, box: Sequence[slice]) -> torch.Tensor:
        """The part of a tensor that ``box`` cuts out, of which alone pages are read.

        Raises:
            ValueError: the checkpoint has no such tensor.
        """
        stored = self._holder(name).get_slice(name)
        part = stored[tuple(box)]
        # Of a row that is cut every page may be touched.
        whole_rows = len(part) * math.prod(stored.get_shape()[1:]) * part.itemsize
        return self._given_out(name, part, whole_rows)

    def copy_rows(self, target: torch.Tensor, name: str, rows: range, columns: Sequence[slice]) -> None:
        """Fills ``target`` with rows of a tensor, of each what ``columns`` cut out, in its own format.

        Raises:
            ValueError: the checkpoint has no such tensor.
        """
        if name not in self._formats:  # read once for all the parts that are asked for
            self._formats[name] = self.dtype(name), self.shape(name)
        dtype, shape = self._formats[name]
        file = self._file_of[name]
        if file not in self._rows:
            self._rows[file] = TensorSlices(file)
        self._rows[file].copy(target, name, dtype, shape, rows, columns)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the tensor ``name``; reads nothing but the header.

        Raises:
            ValueError: the checkpoint has no such tensor.
        """
        return tuple(self._holder(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The format in which the tensor ``name`` is stored."""
        told = _DTYPES.get(self._holder(name).get_slice(name).get_dtype())
        if told is not None:
            return told
        if not self.shape(name):
            return self.read(name).dtype
        return self.read_part(name, [slice(0, 0)]).dtype

    def file_of(self, name: str) -> str:
        """The name of the file that has the tensor ``name``."""
        return self._file_of[name].name

    def _holder(self, name: str) -> safe_open:
        if name not in self._file_of:
            raise ValueError(f"{self.path}: no tensor {name!r} in its safetensors files")
        return self._handle(self._file_of[name])

    def _given_out(self, name: str, tensor: torch.Tensor, touched: int) -> torch.Tensor:
        """``tensor``, which keeps its mapping alive; once enough bytes are touched others get a new one."""
        file = self._file_of[name]
        self._given[file] = self._given.get(file, 0) + touched
        if sum(self._given.values()) > _MAPPED_BYTES:
            for mapped in self._given:
                self._open.pop(mapped, None)
            self._given.clear()
        return tensor
