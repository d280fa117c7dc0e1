"""Writes a safetensors file tensor by tensor, so that it is never in memory as a whole."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

from slime.models.checkpoint.tensor_slices import bytes_of
from slime.utils.misc import naming

Spec = tuple[torch.dtype, tuple[int, ...]]
"""Format and shape of a tensor."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def nbytes(spec: Spec) -> int:
    return spec[0].itemsize * torch.Size(spec[1]).numel()


class SafetensorFile:
    """``with SafetensorFile(path, specs) as file: file.write(name, tensor)``, in any order, each once.

    Raises:
        ValueError: a tensor is of another spec, comes twice or, at the end, has not come; or of a format that
            these files do not have.
        OSError: the file cannot be written; it says which one.
    """

    def __init__(self, path: str | Path, specs: Mapping[str, Spec]) -> None:
        self.path = Path(path)
        self._specs = dict(specs)
        self._missing = set(specs)
        if other := [name for name, (dtype, _) in specs.items() if dtype not in _NAMES]:
            raise ValueError(f"{path}: {other[0]} is {specs[other[0]][0]}, which is not written")
        header, self._offsets, end = layout(specs)
        self._file = self.path.open("wb", buffering=0)
        try:
            self._put(memoryview(header), 0)
            with naming(self.path):
                self._file.truncate(end)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SafetensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._missing:
            raise ValueError(f"{self.path}: tensor {min(self._missing)!r} was not written")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        spec = (tensor.dtype, tuple(tensor.shape))
        if self._specs.get(name) != spec or name not in self._missing:
            raise ValueError(f"{self.path}: {name!r} {spec} (wanted: {self._specs.get(name)}, once)")
        tensor = tensor.detach().cpu().contiguous()
        self._put(bytes_of(tensor), self._offsets[name])
        self._missing.remove(name)

    def _put(self, data: memoryview, at: int) -> None:
        """All of it: one write may take a part, where the disk is nearly full for instance."""
        with naming(self.path):
            while data:
                written = os.pwrite(self._file.fileno(), data, at)
                data, at = data[written:], at + written


def layout(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int], int]:
    """The header, where in the file each tensor begins, and the size of the file.

    Wide formats come first, so that every tensor is aligned to its own.
    """
    entries, starts, at = {}, {}, 0
    for name in sorted(specs, key=lambda name: (-specs[name][0].itemsize, name)):
        dtype, shape = specs[name]
        end = at + nbytes(specs[name])
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        starts[name], at = at, end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return (
        len(text).to_bytes(8, "little") + text,
        {n: first + start for n, start in starts.items()},
        first + at,
    )
