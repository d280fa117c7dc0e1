"""Quantised weights in the files of a checkpoint: which there are, and reading parts of them, dequantised."""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from slime.models.checkpoint import fp8, int4, mxfp4, mxfp8
from slime.models.checkpoint.encoding import (
    Encoding,
    Fp8Encoding,
    Int4Encoding,
    Mxfp4Encoding,
    Mxfp8Encoding,
)
from slime.models.checkpoint.quantization import Quantization
from slime.models.checkpoint.safetensors_dir import SafetensorReader

# What stands beside quantised weights. Scales of activations and of caches belong to no weight.
_BESIDE = ("_scale_inv", ".weight_scale", ".weight_shape", ".input_scale", ".k_scale", ".v_scale")
_PACKED, _BLOCKS, _SCALES = "_packed", "_blocks", "_scales"
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
Span = tuple[int, int]
"""From, and up to which."""


class EncodedWeight(Protocol):
    """A quantised weight in the files.

    Attributes:
        stored: the tensor that has its numbers.
    """

    stored: str

    def shape(self) -> tuple[int, ...]: ...
    def part(self, box: Sequence[Span]) -> torch.Tensor: ...
    def encoding(self) -> Encoding: ...


def plain_names(names: Sequence[str], quantization: Quantization) -> list[str]:
    """The tensors that neither hold quantised numbers, unless under the plain name, nor stand beside them."""
    parts = (_BLOCKS, _SCALES) if quantization.kind == "mxfp4" else (*_BESIDE, _PACKED)
    return [name for name in names if not name.endswith(parts)]


def encoded_weights(raw: SafetensorReader, quantization: Quantization) -> Iterator[tuple[str, EncodedWeight]]:
    """(name of the weight, how it is read) of those with a scale beside them.

    Raises:
        ValueError: a weight lacks its scale, or numbers are quantised in a way that is not read.
    """
    there = set(raw.names())
    for name in raw.names():
        if quantization.kind == "int4" and name.endswith(_PACKED):
            weight = name.removesuffix(_PACKED)
            _refuse_plain(raw, weight, name, there)
            yield weight, _Int4Weight(raw, weight, quantization.group)
        elif quantization.kind == "mxfp4" and name.endswith((_BLOCKS, _SCALES)):
            weight = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
            _require_whole(raw, weight, name, there)
            if name.endswith(_BLOCKS):
                yield weight, _Mxfp4Weight(raw, weight)
        elif quantization.is_float8 and name.endswith(".weight"):
            beside = (f"{name}_scale_inv", f"{name}_scale")
            if quantization.kind == "mxfp8" and beside[0] in there:
                yield name, _Mxfp8Weight(raw, name)
            elif quantization.kind == "fp8" and (scale := next((s for s in beside if s in there), None)):
                yield name, _Fp8Weight(raw, name, scale, quantization)
            elif raw.dtype(name).itemsize == 1:
                raise ValueError(f"{raw.path}: {name} is quantised and has no {name}_scale_inv")
        elif not name.endswith(_BESIDE) and raw.dtype(name) in _CODES:
            # Their scales would be left out, and the codes be taken for the weights.
            raise ValueError(f"{raw.path}: {name} is {raw.dtype(name)}: quantised in a way that is not read")


def _require_whole(raw: SafetensorReader, weight: str, name: str, there: set[str]) -> None:
    """Raises ValueError if of numbers and scales one is missing, or the weight is there plain as well."""
    file = raw.path / raw.file_of(name)
    for other in (f"{weight}{_BLOCKS}", f"{weight}{_SCALES}"):
        if other not in there:
            raise ValueError(f"{file}: {name} is there and no {other}")
    _refuse_plain(raw, weight, name, there)


def _refuse_plain(raw: SafetensorReader, weight: str, name: str, there: set[str]) -> None:
    """Raises ValueError if the weight is there plain as well: nothing says which of the two it is."""
    if weight in there:
        file = raw.path / raw.file_of(name)
        raise ValueError(f"{file}: has {name}, and {weight} as well (wanted: one of them)")


class _Fp8Weight:
    """One scale for the tensor, for each row, or for each block."""

    def __init__(self, raw: SafetensorReader, name: str, scale: str, quantization: Quantization) -> None:
        self._raw, self._name, self._scale, self._quantization = raw, name, scale, quantization
        self.stored = name

    def shape(self) -> tuple[int, int]:
        """Raises ValueError if the weight is no matrix."""
        shape = self._raw.shape(self._name)
        if len(shape) != 2:
            raise ValueError(f"{self._raw.path}: {self._name} is quantised and {list(shape)}, no matrix")
        return shape[0], shape[1]

    def part(self, box: Sequence[Span]) -> torch.Tensor:
        """Raises ValueError if a scale is not finite."""
        rows, columns = box
        codes = _part(self._raw, self._name, rows, columns)
        block = self._block()
        scale = self._raw.read(self._scale).view(fp8.scale_shape(self.shape(), block))
        touched = [_groups(span, size) for span, size in zip(box, block, strict=True)]
        part = scale[touched[0][0] : touched[0][1], touched[1][0] : touched[1][1]]
        _require_finite(part, self._raw, self._scale)
        return fp8.dequantize(codes, part, block, rows, columns)

    def encoding(self) -> Encoding:
        scale = self._raw.dtype(self._scale), self._raw.shape(self._scale)
        power_of_two = self._quantization.power_of_two
        return Fp8Encoding(self._name, self.shape(), self._block(), self._scale, scale, power_of_two)

    def _block(self) -> tuple[int, int]:
        """What shares a scale.

        Raises:
            ValueError: there are other numbers of scales than the weight needs.
        """
        shape, scale = self.shape(), self._raw.shape(self._scale)
        unnamed = shape if math.prod(scale) == 1 else (1, shape[1])
        block = self._quantization.block or unnamed
        wanted = fp8.scale_shape(shape, block)
        if math.prod(scale) != wanted[0] * wanted[1] or (len(scale) == 2 and scale != wanted):
            raise ValueError(
                f"{self._raw.path}: {self._scale} is {list(scale)}, wanted {list(wanted)} for "
                f"{self._name} {list(shape)}"
            )
        return block


class _Int4Weight:
    """One scale for each group of a row.

    Raises:
        ValueError: its numbers are not in words of 32 bits.
    """

    def __init__(self, raw: SafetensorReader, name: str, group: int | None) -> None:
        self._raw, self._name, self._group = raw, name, group
        self.stored = f"{name}{_PACKED}"
        if (found := raw.dtype(self.stored)) != torch.int32:
            raise ValueError(f"{raw.path}: {self.stored} is {found}, wanted torch.int32")

    def shape(self) -> tuple[int, int]:
        """Raises ValueError if it is not that of a matrix, or of another one than is stored."""
        sizes = self._raw.read(f"{self._name}_shape").tolist()
        if not isinstance(sizes, list) or len(sizes) != 2:
            raise ValueError(
                f"{self._raw.path}: {self._name}_shape is {sizes!r:.80}, wanted rows and columns"
            )
        rows, columns = map(int, sizes)
        words = self._raw.shape(self.stored)
        if words != (rows, -(-columns // int4.PER_WORD)):
            raise ValueError(
                f"{self._raw.path}: {self.stored} is {list(words)}, not {[rows, columns]} packed"
            )
        return rows, columns

    def part(self, box: Sequence[Span]) -> torch.Tensor:
        """Raises ValueError if a scale is not finite."""
        rows, columns = box
        width = self.shape()[1]
        group = self._group or width
        scales = f"{self._name}_scale"
        if (found := self._raw.shape(scales)) != (self.shape()[0], -(-width // group)):
            raise ValueError(f"{self._raw.path}: {scales} is {list(found)}, not one for {group} columns")
        first, last = _groups(columns, int4.PER_WORD)
        codes = int4.unpack(_part(self._raw, self.stored, rows, (first, last)))
        start = columns[0] - first * int4.PER_WORD
        codes = codes[:, start : start + columns[1] - columns[0]]
        scale = _part(self._raw, scales, rows, _groups(columns, group))
        _require_finite(scale, self._raw, scales)
        return int4.dequantize(codes, scale, group, columns[0])

    def encoding(self) -> Encoding:
        """The shape is what the scales cover, so that no tensor has to be read."""
        rows, words = self._raw.shape(self.stored)
        groups = self._raw.shape(f"{self._name}_scale")[1]
        shape = rows, groups * self._group if self._group else words * int4.PER_WORD
        formats = [self._raw.dtype(f"{self._name}_{part}") for part in ("scale", "shape")]
        return Int4Encoding(self._name, shape, self._group or shape[1], *formats)


class _Mxfp4Weight:
    """Experts of a layer in one tensor: [experts, inputs, outputs], stored [experts, outputs, groups, bytes].

    Raises:
        ValueError: numbers or scales are of another format or shape.
    """

    def __init__(self, raw: SafetensorReader, name: str) -> None:
        self._raw, self._name = raw, name
        self.stored, self._scales = f"{name}{_BLOCKS}", f"{name}{_SCALES}"
        for part in (self.stored, self._scales):
            if raw.dtype(part) != torch.uint8:
                raise ValueError(f"{self._file(part)}: {part} is {raw.dtype(part)}, wanted torch.uint8")
        blocks, scales = raw.shape(self.stored), raw.shape(self._scales)
        if len(blocks) != 4 or blocks[3] != mxfp4.BYTES:
            wanted = f"[experts, outputs, groups, {mxfp4.BYTES}]"
            raise ValueError(f"{self._file(self.stored)}: {self.stored} is {list(blocks)}, wanted {wanted}")
        if scales != blocks[:3]:
            raise ValueError(
                f"{self._file(self._scales)}: {self._scales} is {list(scales)}, wanted {list(blocks[:3])} "
                f"for {self.stored} {list(blocks)}"
            )
        self._shape = blocks[0], blocks[2] * mxfp4.GROUP, blocks[1]

    def _file(self, part: str) -> str:
        return str(self._raw.path / self._raw.file_of(part))

    def shape(self) -> tuple[int, int, int]:
        return self._shape

    def part(self, box: Sequence[Span]) -> torch.Tensor:
        """Raises ValueError if a number is not finite."""
        experts, inputs, outputs = box
        stored = experts, outputs, _groups(inputs, mxfp4.GROUP)
        blocks, scales = (_part(self._raw, part, *stored) for part in (self.stored, self._scales))
        try:
            values = mxfp4.dequantize(blocks, scales)
        except ValueError as error:
            raise ValueError(f"{self._file(self._scales)}: {self._scales} {error}") from error
        start = inputs[0] % mxfp4.GROUP
        return values[..., start : start + inputs[1] - inputs[0]].transpose(1, 2)

    def encoding(self) -> Encoding:
        return Mxfp4Encoding(self._name, self._shape)


class _Mxfp8Weight:
    """One scale, a power of two in a byte, for each group of a row.

    Raises:
        ValueError: numbers or scales are of another format or shape.
    """

    def __init__(self, raw: SafetensorReader, name: str) -> None:
        self._raw, self._name, self._scale = raw, name, f"{name}_scale_inv"
        self.stored = name
        shape = raw.shape(name)
        if len(shape) != 2:
            raise ValueError(f"{self._file(name)}: {name} is quantised and {list(shape)}, no matrix")
        self._encoding = Mxfp8Encoding(name, (shape[0], shape[1]))
        for part, (dtype, wanted) in self._encoding.specs().items():
            if (found := raw.dtype(part)) != dtype:
                raise ValueError(f"{self._file(part)}: {part} is {found}, wanted {dtype}")
            if (sizes := raw.shape(part)) != wanted:
                raise ValueError(
                    f"{self._file(part)}: {part} is {list(sizes)}, wanted {list(wanted)} for {name} "
                    f"{list(shape)}"
                )

    def _file(self, part: str) -> str:
        return str(self._raw.path / self._raw.file_of(part))

    def shape(self) -> tuple[int, int]:
        return self._encoding.shape

    def part(self, box: Sequence[Span]) -> torch.Tensor:
        """Raises ValueError if a number is not finite."""
        rows, columns = box
        codes = _part(self._raw, self._name, rows, columns)
        scales = _part(self._raw, self._scale, rows, _groups(columns, mxfp8.GROUP))
        try:
            return mxfp8.dequantize(codes, scales, columns[0])
        except ValueError as error:
            raise ValueError(f"{self._file(self._name)}: {self._name} {error}") from error

    def encoding(self) -> Encoding:
        return self._encoding


def _part(raw: SafetensorReader, name: str, *box: Span) -> torch.Tensor:
    return raw.read_part(name, [slice(*span) for span in box])


def _require_finite(scales: torch.Tensor, raw: SafetensorReader, name: str) -> None:
    """Raises ValueError if a scale is not: every number of its block would be none either."""
    wide = scales.float()  # not every format of scales has a test of its own
    if not bool(torch.isfinite(wide).all()):
        count = int((~torch.isfinite(wide)).sum())
        raise ValueError(f"{raw.path / raw.file_of(name)}: {name} has {count} scales that are not finite")


def _groups(span: Span, size: int) -> Span:
    """The groups of ``size`` that a span touches."""
    return span[0] // size, -(-span[1] // size)
