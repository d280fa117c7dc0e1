"""Reads tensors, or parts of them, by name from the safetensors files of a checkpoint directory."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from slime.models.stored_rows import StoredRows

_INDEX = "model.safetensors.index.json"
# Pages of a mapped file count as memory of the process until the mapping ends.
_MAPPED_BYTES = 32 * 1024**2
# Those of weights, by their names in headers; others are seen from what is read.
_DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn},
    **{"I32": torch.int32, "I64": torch.int64, "U8": torch.uint8},
}


def _is_pointer(file: Path) -> bool:
    """Whether git has cloned the name of a large file in place of the file."""
    with file.open("rb") as stream:
        return stream.read(40).startswith(b"version https://git-lfs")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index}: not valid JSON ({error})") from error
    except (TypeError, KeyError) as error:
        raise ValueError(f"{index}: has no weight_map (wanted: a mapping from tensor to file)") from error
    plain = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not plain or not weight_map:
        raise ValueError(f"{index}: weight_map is {weight_map!r:.80} (wanted: a mapping from tensor to file)")
    if outside := [file for file in weight_map.values() if Path(file).name != file]:
        raise ValueError(f"{index}: {outside[0]!r} is no file of that directory")
    return weight_map


class SafetensorReader:
    """``with SafetensorReader(path) as reader: reader.read(name)``. Files are opened when first needed.

    Raises:
        ValueError: the directory has no safetensors files, its index names a missing file, or a file cannot
            be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[Path, safe_open] = {}
        self._given: dict[Path, int] = {}
        self._rows: dict[Path, StoredRows] = {}
        self._formats: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._file_of = self._index()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        for rows in self._rows.values():
            rows.close()
        self._rows.clear()

    def names(self) -> list[str]:
        """All tensors, file by file."""
        return list(self._file_of)

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
            self._rows[file] = StoredRows(file)
        self._rows[file].copy(target, name, dtype, shape, rows, columns)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor ``name``; reads nothing but the header.

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

    def open_all(self) -> None:
        """Reads the header of every file, which tells whether the file is whole.

        Raises:
            ValueError: a file cannot be read, or lacks a tensor that the index says is in it.
        """
        for file in dict.fromkeys(self._file_of.values()):
            inside = set(self._handle(file).keys())
            lacking = [name for name, place in self._file_of.items() if place == file and name not in inside]
            if lacking:
                raise ValueError(f"{file}: no tensor {lacking[0]!r}, but {_INDEX} says that it is there")

    def _index(self) -> dict[str, Path]:
        index = self.path / _INDEX
        if index.is_file():
            weight_map = _weight_map(index)
            missing = sorted({f for f in weight_map.values() if not (self.path / f).is_file()})
            if missing:
                raise ValueError(f"{index}: names files that do not exist: {', '.join(missing)}")
            return {name: self.path / file for name, file in weight_map.items()}
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.path}: no *.safetensors files (wanted: a Hugging Face checkpoint)")
        return {name: file for file in files for name in self._handle(file).keys()}  # noqa: SIM118

    def _holder(self, name: str) -> safe_open:
        if name not in self._file_of:
            raise ValueError(f"{self.path}: no tensor {name!r} in its safetensors files")
        return self._handle(self._file_of[name])

    def _given_out(self, name: str, tensor: torch.Tensor, touched: int) -> torch.Tensor:
        """``tensor``, which keeps its mapping alive; once enough bytes are touched others get a new one."""
        file = self._file_of[name]
        self._given[file] = self._given.get(file, 0) + touched
        if self._given[file] > _MAPPED_BYTES:
            self._given[file] = 0
            del self._open[file]
        return tensor

    def _handle(self, file: Path) -> safe_open:
        if file not in self._open:
            if not file.is_file():  # opening a pipe would wait for ever
                raise ValueError(f"{file}: not a readable safetensors file (is no file)")
            try:
                self._open[file] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                reason = "a pointer of git-lfs; wanted: git lfs pull" if _is_pointer(file) else error
                raise ValueError(f"{file}: not a readable safetensors file ({reason})") from error
        return self._open[file]
