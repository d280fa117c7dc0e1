"""Reads tensors by name from the safetensors files of a checkpoint directory."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

_INDEX = "model.safetensors.index.json"


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
        self._file_of = self._index()

    def __enter__(self) -> "SafetensorReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    def names(self) -> list[str]:
        """All tensors, file by file."""
        return list(self._file_of)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors one by one, so that only one is in memory beside the model."""
        return ((name, self.read(name)) for name in self._file_of)

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """The tensor ``name`` on the CPU, as it is stored; with an ``index`` only that part of it.

        Raises:
            ValueError: the checkpoint has no such tensor.
        """
        if name not in self._file_of:
            raise ValueError(f"{self.path}: no tensor {name!r} in its safetensors files")
        handle = self._handle(self._file_of[name])
        if index is None:
            return handle.get_tensor(name)
        whole = handle.get_slice(name)
        if index >= whole.get_shape()[0]:
            raise ValueError(f"{self.path}: {name} {whole.get_shape()} has no part {index}")
        part: torch.Tensor = whole[index]
        return part

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

    def _handle(self, file: Path) -> safe_open:
        if file not in self._open:
            if not file.is_file():  # opening a pipe would wait for ever
                raise ValueError(f"{file}: not a readable safetensors file (is no file)")
            try:
                self._open[file] = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file}: not a readable safetensors file ({error})") from error
        return self._open[file]
