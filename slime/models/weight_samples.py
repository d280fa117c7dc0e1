"""A look at the weights of a checkpoint before anything starts: headers, and a few values of each file.

Needs no torch. Shapes are those of tensors whose size ``config.json`` alone decides.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime.models.shape import ShapeArgs

_LAYER = re.compile(r"model\.layers\.\d+\.(.+)")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALES = ("_scale_inv", "_scale")
_EXPONENTS: Mapping[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.uint64, 0x7FF0000000000000),
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""Unsigned integers of the same size, and the bits that are all set in NaN and infinities alone."""
_READS = 512  # of all files together, two of each at least
_READ_SIZE = 16384  # bytes
_LONGEST_HEADER = 1 << 30  # bytes


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
            header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                shape = tuple(entry["shape"])
                found[name] = StoredTensor(name, file, entry["dtype"], shape, start, end)
    return found


def bad_weights(path: str | Path, shape: ShapeArgs | None, quantized: bool) -> str | None:
    """The first thing that is wrong with stored weights, with file and tensor; None if nothing is.

    Args:
        shape: of the model, where its tensors have the names of a family.
        quantized: whether ``config.json`` says how the weights are to be read.
    """
    tensors = read_headers(path)
    wanted = {} if shape is None or quantized else wanted_shapes(shape, tensors)
    for tensor in tensors.values():
        if reason := _bad_format(tensor, tensors, quantized, tensor.name in wanted):
            return f"{tensor.file}: {tensor.name} is {tensor.dtype} {reason}"
        if tensor.shape != (size := wanted.get(tensor.name, tensor.shape)):
            return f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)} (wanted: {list(size)})"
    return _bad_values(list(tensors.values()))


def wanted_shapes(shape: ShapeArgs, names: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of those among these tensors of which they are known."""
    known, of_model = dict(_in_layer(shape)), _of_model(shape)
    found = {}
    for name in names:
        layer = _LAYER.fullmatch(name)
        size = known.get(layer[1]) if layer else of_model.get(name)
        if size is not None:
            found[name] = size
    return found


def _of_model(shape: ShapeArgs) -> dict[str, tuple[int, ...]]:
    words = (shape.vocab_size, shape.hidden_size)
    return {
        "model.embed_tokens.weight": words,
        "lm_head.weight": words,
        "model.norm.weight": (shape.hidden_size,),
    }


def _in_layer(shape: ShapeArgs) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if shape.kv_lora_rank is None and shape.linear_attention_freq is None:
        heads = shape.num_attention_heads * shape.kv_channels
        groups = shape.num_query_groups * shape.kv_channels
        yield "self_attn.k_proj.weight", (groups, hidden)
        yield "self_attn.v_proj.weight", (groups, hidden)
        gated = getattr(shape, "attention_output_gate", False)  # a row of its gate for each row of a query
        yield "self_attn.q_proj.weight", (heads * 2 if gated else heads, hidden)
        yield "self_attn.o_proj.weight", (hidden, heads)
    if not shape.num_experts:
        yield "mlp.gate_proj.weight", (ffn, hidden)
        yield "mlp.up_proj.weight", (ffn, hidden)
        yield "mlp.down_proj.weight", (hidden, ffn)


def _bad_format(
    tensor: StoredTensor, all_: Mapping[str, StoredTensor], quantized: bool, is_weight: bool
) -> str | None:
    if tensor.dtype in _EIGHT_BITS:
        if any(tensor.name + scale in all_ for scale in _SCALES) and quantized:
            return None
        return "without a scale (wanted: quantization_config in config.json, and a scale for each weight)"
    if is_weight and tensor.dtype not in _FLOATS:
        return f"(wanted: {', '.join(sorted(_FLOATS))}, or quantization_config in config.json)"
    return None


def _bad_values(tensors: list[StoredTensor]) -> str | None:
    """Looks at a few tensors of each file: NaN and infinities are seldom alone."""
    files: dict[Path, list[StoredTensor]] = {}
    for tensor in tensors:
        if tensor.dtype in _EXPONENTS and tensor.end > tensor.start:
            files.setdefault(tensor.file, []).append(tensor)
    reads = max(_READS // max(len(files), 1), 2)
    for file, inside in files.items():
        with file.open("rb") as stream:
            for tensor in inside[:: -(-len(inside) // reads)]:
                stream.seek(tensor.start)
                if _has_infinite(stream.read(min(tensor.end - tensor.start, _READ_SIZE)), tensor.dtype):
                    return f"{file}: {tensor.name} holds NaN or infinite values (wanted: finite weights)"
    return None


def _has_infinite(data: bytes, dtype: str) -> bool:
    kind, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(data[: len(data) // np.dtype(kind).itemsize * np.dtype(kind).itemsize], kind)
    return bool(((bits & kind(exponent)) == kind(exponent)).any())
