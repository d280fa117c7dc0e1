"""A look at the weights of a checkpoint before anything starts: names, headers, a few values of each file.

Needs no torch, but for the names of weights that are stored in another form than the model has.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime.models.checkpoint.expert_forms import stacks_of
from slime.models.checkpoint.quantization import Quantization, read_quantization
from slime.models.checkpoint.safetensors_index import SafetensorIndex
from slime.models.checkpoint.stored_forms import EIGHT_BITS, StoredForms
from slime.models.checkpoint.tensor_shapes import TensorShapes
from slime.models.hf_config import HfConfig
from slime.models.shape import ModelShape

_EXPONENTS: Mapping[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.uint64, 0x7FF0000000000000),
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),
    "F8_E5M2": (np.uint8, 0x7C),
    "F8_E8M0": (np.uint8, 0xFF),
}
"""Unsigned integers of the same size, and the bits that are all set in NaN and infinities alone."""
_READS = 512  # of all files together, two of each at least
_READ_SIZE = 16384  # bytes


@dataclass(frozen=True)
class StoredTensor:
    """What the header of a file says of a tensor; ``start`` and ``end`` are offsets in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_headers(path: str | Path) -> dict[str, StoredTensor]:
    """All tensors of the safetensors files in a directory, which are known to be readable."""
    found = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                shape = tuple(entry["shape"])
                found[name] = StoredTensor(name, file, entry["dtype"], shape, start, end)
    return found


def bad_weights(path: str | Path, shape: ModelShape | None, quantization: Quantization | None) -> str | None:
    """The first thing that is wrong with stored weights, with file and tensor; None if nothing is.

    Args:
        shape: of the model, where it is one of a family.
        quantization: how ``config.json`` says that the weights are to be read.
    """
    tensors = read_headers(path)
    return bad_headers(tensors, shape, quantization) or _bad_values(list(tensors.values()))


def bad_headers(
    tensors: Mapping[str, StoredTensor], shape: ModelShape | None, quantization: Quantization | None
) -> str | None:
    """The first thing that is wrong with shapes and formats; None if nothing is."""
    forms = StoredForms(TensorShapes(shape).of if shape else _unknown, quantization, tensors)
    for tensor in tensors.values():
        if tensor.dtype in EIGHT_BITS and not forms.has_scale(tensor.name):
            wanted = "quantization_config in config.json, and a scale for each weight"
            return f"{tensor.file}: {tensor.name} is {tensor.dtype} without a scale (wanted: {wanted})"
        form = forms.of(tensor.name)
        if form is not None and tensor.dtype not in form.dtypes:
            wanted = ", ".join(sorted(form.dtypes))
            wanted += "" if quantization else ", or quantization_config in config.json"
            return f"{tensor.file}: {tensor.name} is {tensor.dtype} (wanted: {wanted})"
        if form is not None and tensor.shape != form.sizes:
            found = list(tensor.shape)
            return f"{tensor.file}: {tensor.name} has shape {found} (wanted: {list(form.sizes)})"
    return None


def _unknown(name: str) -> None:
    del name


def _bad_values(tensors: list[StoredTensor]) -> str | None:
    """Looks at a few tensors of each file: NaN and infinities are seldom alone."""
    files: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        if _format(tensor) in _EXPONENTS and tensor.end > tensor.start:
            files.setdefault(tensor.file, []).append(tensor)
    reads = max(_READS // max(len(files), 1), 2)
    for file, inside in files.items():
        with file.open("rb") as stream:
            for tensor in inside[:: -(-len(inside) // reads)]:
                stream.seek(tensor.start)
                if _has_infinite(stream.read(min(tensor.end - tensor.start, _READ_SIZE)), _format(tensor)):
                    return f"{file}: {tensor.name} holds NaN or infinite values (wanted: finite weights)"
    return None


def _format(tensor: StoredTensor) -> str:
    """Returns the format of its numbers: scales of MXFP4 and MXFP8 are powers of two in bytes."""
    scales = tensor.dtype == "U8" and tensor.name.endswith(("_scales", "_scale_inv"))
    return "F8_E8M0" if scales else tensor.dtype


def _has_infinite(data: bytes, dtype: str) -> bool:
    kind, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(data[: len(data) // np.dtype(kind).itemsize * np.dtype(kind).itemsize], kind)
    return bool(((bits & kind(exponent)) == kind(exponent)).any())


def weight_names(path: str | Path) -> set[str]:
    """The names of all weights, under those that a model has; reads no more than headers.

    Raises:
        ValueError: see `slime.models.checkpoint.weights_dir.WeightsReader`.
    """
    with SafetensorIndex(path) as index:
        index.open_all()
        if _has_plain_names(index):
            return set(index.names())
    from slime.models.checkpoint.weights_dir import WeightsReader  # imports torch

    with WeightsReader(path) as reader:
        return set(reader.names())


def _has_plain_names(index: SafetensorIndex) -> bool:
    """Whether the files name the weights as the model does."""
    try:
        if not (index.path / "config.json").is_file():
            return True
        config = HfConfig.read(index.path)
        return read_quantization(config) is None and not stacks_of(index.names(), config)
    except ValueError:  # the other reader says what is wrong
        return False
