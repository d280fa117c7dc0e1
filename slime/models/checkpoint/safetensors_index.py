"""Which tensors the safetensors files of a checkpoint directory have; reads headers, and needs no torch."""

import json
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"


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
        raise ValueError(f"{index}: {outside[0]!r} is not a file of that directory")
    return weight_map


class SafetensorIndex:
    """``with SafetensorIndex(path) as index: index.names()``. Files are opened when first needed.

    Raises:
        ValueError: the directory has no safetensors files, its index names a missing file, or a file cannot
            be read.
    """

    framework = "numpy"
    """Whose tensors the files would give; it is imported when the first of them is opened."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[Path, safe_open] = {}
        self._file_of = self._index()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    def names(self) -> list[str]:
        """All tensors, file by file."""
        return list(self._file_of)

    def open_all(self) -> None:
        """Reads the header of every file, which tells whether the file is whole.

        Raises:
            ValueError: a file cannot be read, or lacks a tensor that the index says is in it.
        """
        names_of: dict[Path, list[str]] = {}
        for name, file in self._file_of.items():
            names_of.setdefault(file, []).append(name)
        for file, names in names_of.items():
            inside = set(self._handle(file).keys())
            lacking = next((name for name in names if name not in inside), None)
            if lacking is not None:
                raise ValueError(f"{file}: no tensor {lacking!r}, but {INDEX} says that it is there")

    def _index(self) -> dict[str, Path]:
        index = self.path / INDEX
        if index.is_file():
            weight_map = _weight_map(index)
            missing = sorted({f for f in weight_map.values() if not (self.path / f).is_file()})
            if missing:
                raise ValueError(f"{index}: names files that do not exist: {', '.join(missing)}")
            paths = {file: self.path / file for file in set(weight_map.values())}
            return {name: paths[file] for name, file in weight_map.items()}
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.path}: no *.safetensors files (wanted: a Hugging Face checkpoint)")
        return {name: file for file in files for name in self._handle(file).keys()}  # noqa: SIM118

    def _handle(self, file: Path) -> safe_open:
        if file not in self._open:
            if not file.is_file():  # opening a pipe would wait for ever
                raise ValueError(f"{file}: not a readable safetensors file (is not a file)")
            try:
                self._open[file] = safe_open(file, framework=self.framework, device="cpu")
            except (SafetensorError, OSError) as error:
                reason = "a pointer of git-lfs; wanted: git lfs pull" if _is_pointer(file) else error
                raise ValueError(f"{file}: not a readable safetensors file ({reason})") from error
        return self._open[file]
