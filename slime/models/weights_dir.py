"""The weights of a checkpoint directory, quantised or not, under the names that a model has."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from slime.models import fp8, int4
from slime.models.encoding import Encoding, Fp8Encoding, Int4Encoding
from slime.models.expert_forms import stacks_of
from slime.models.hf_config import HfConfig
from slime.models.quantization import Quantization, read_quantization
from slime.models.safetensors_dir import SafetensorReader

# What stands beside quantised weights. Scales of activations and of caches belong to no weight.
_BESIDE = ("_scale_inv", ".weight_scale", ".weight_shape", ".input_scale", ".k_scale", ".v_scale")
_PACKED = "_packed"
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
# Rows that are dequantised at once.
_BLOCK_BYTES = 8 * 1024**2


class _Encoded(Protocol):
    def shape(self) -> tuple[int, int]: ...
    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor: ...
    def encoding(self) -> Encoding: ...


class WeightsReader(SafetensorReader):
    """As `SafetensorReader`. Quantised weights are read in float32, dequantised, under the plain names.

    Experts that the checkpoint has one by one, and the family in one tensor for each layer, are read so.

    Attributes:
        stacks: by name these tensors; for each expert the matrices in its rows.

    Raises:
        ValueError: see `SafetensorReader`; the weights are quantised in a way that is not read; or a tensor
            that is lacks its scale.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        config = HfConfig.read(path) if (self.path / "config.json").is_file() else None
        self.quantization = None if config is None else read_quantization(config)
        self._encoded: dict[str, _Encoded] = {}
        self.stacks: dict[str, list[tuple[str, ...]]] = {}
        self._names = super().names()
        if self.quantization is not None:
            self._encoded = dict(self._find(self.quantization))
            plain = [name for name in self._names if not name.endswith((*_BESIDE, _PACKED))]
            self._names = list(dict.fromkeys([*plain, *self._encoded]))
        if config is not None:
            self.stacks = self._find_stacks(config)

    def names(self) -> list[str]:
        return list(self._names)

    @cached_property
    def quantized(self) -> frozenset[str]:
        """The weights that are."""
        stacks = {name for name, rows in self.stacks.items() if rows[0][0] in self._encoded}
        return frozenset(self._encoded) | stacks

    def encodings(self) -> dict[str, Encoding]:
        """How each of them is stored; reads nothing but headers."""
        return {name: encoded.encoding() for name, encoded in self._encoded.items()}

    def file_of(self, name: str) -> str:
        if name in self.stacks:
            return self.file_of(self.stacks[name][0][0])
        return super().file_of(name if name in self._file_of else f"{name}{_PACKED}")

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.read(name)) for name in self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.stacks:
            experts = self.stacks[name]
            rows = sum(self.shape(part)[0] for part in experts[0])
            return len(experts), rows, self.shape(experts[0][0])[1]
        encoded = self._encoded.get(name)
        return super().shape(name) if encoded is None else encoded.shape()

    def dtype(self, name: str) -> torch.dtype:
        if name in self.stacks:
            return self.dtype(self.stacks[name][0][0])
        return torch.float32 if name in self._encoded else super().dtype(name)

    def read(self, name: str) -> torch.Tensor:
        if name in self.stacks:
            return self.read_part(name, [slice(None)])
        if name not in self._encoded:
            return super().read(name)
        whole = torch.empty(self.shape(name))
        step = max(1, _BLOCK_BYTES // max(1, whole[0].nbytes))
        for start in range(0, len(whole), step):
            box = [slice(start, start + step), slice(None)]
            whole[start : start + step] = self.read_part(name, box)
        return whole

    def read_part(self, name: str, box: Sequence[slice]) -> torch.Tensor:
        if name in self.stacks:
            experts = self.stacks[name][box[0]]
            whole = self.shape(name)
            stack = torch.empty((len(experts), *whole[1:]), dtype=self.dtype(name))
            for parts, rows in zip(experts, stack, strict=True):
                torch.cat([self.read(part) for part in parts], out=rows)
            return stack[(slice(None), *box[1:])]
        encoded = self._encoded.get(name)
        if encoded is None:
            return super().read_part(name, box)
        full = [*box, *[slice(None)] * (2 - len(box))]
        rows, columns = (part.indices(size)[:2] for part, size in zip(full, encoded.shape(), strict=True))
        return encoded.part(rows, columns)

    def copy_rows(self, target: torch.Tensor, name: str, rows: range, columns: Sequence[slice]) -> None:
        if name not in self._encoded and name not in self.stacks:
            super().copy_rows(target, name, rows, columns)
            return
        step = max(1, _BLOCK_BYTES * len(rows) // max(1, target.numel() * 4))
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            target[at : at + step].copy_(self.read_part(name, [slice(part.start, part.stop), *columns]))

    def _find_stacks(self, config: HfConfig) -> dict[str, list[tuple[str, ...]]]:
        """By name the matrices of each expert; these names give way to those."""
        try:
            stacks = stacks_of(self._names, config)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        taken = {part for experts in stacks.values() for parts in experts for part in parts}
        self._names = [name for name in self._names if name not in taken] + list(stacks)
        return stacks

    def _find(self, quantization: Quantization) -> Iterator[tuple[str, _Encoded]]:
        """(name of the weight, how it is read) of those with a scale beside them."""
        there = set(self._names)
        raw = _Raw(self)
        for name in self._names:
            if quantization.kind == "int4" and name.endswith(_PACKED):
                weight = name.removesuffix(_PACKED)
                yield weight, _Int4Weight(raw, weight, quantization.group)
            elif quantization.kind == "fp8" and name.endswith(".weight"):
                beside = (f"{name}_scale_inv", f"{name}_scale")
                if scale := next((scale for scale in beside if scale in there), None):
                    yield name, _Fp8Weight(raw, name, scale, quantization)
                elif super().dtype(name).itemsize == 1:
                    raise ValueError(f"{self.path}: {name} is quantised and has no {name}_scale_inv")
            elif not name.endswith(_BESIDE) and super().dtype(name) in _CODES:
                # Their scales would be left out, and the codes be taken for the weights.
                raise ValueError(
                    f"{self.path}: {name} is {super().dtype(name)}: quantised in a way that is not read"
                )


class _Raw:
    """The tensors as they are stored."""

    def __init__(self, reader: WeightsReader) -> None:
        self.path = reader.path
        self._reader = reader

    def shape(self, name: str) -> tuple[int, ...]:
        return SafetensorReader.shape(self._reader, name)

    def dtype(self, name: str) -> torch.dtype:
        return SafetensorReader.dtype(self._reader, name)

    def read(self, name: str) -> torch.Tensor:
        return SafetensorReader.read(self._reader, name)

    def part(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
        return SafetensorReader.read_part(self._reader, name, [slice(*rows), slice(*columns)])


class _Fp8Weight:
    """One scale for the tensor, for each row, or for each block."""

    def __init__(self, raw: _Raw, name: str, scale: str, quantization: Quantization) -> None:
        self._raw, self._name, self._scale, self._quantization = raw, name, scale, quantization

    def shape(self) -> tuple[int, int]:
        """Raises ValueError if the weight is no matrix."""
        shape = self._raw.shape(self._name)
        if len(shape) != 2:
            raise ValueError(f"{self._raw.path}: {self._name} is quantised and {list(shape)}, no matrix")
        return shape[0], shape[1]

    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
        codes = self._raw.part(self._name, rows, columns)
        block = self._block()
        scale = self._raw.read(self._scale).view(fp8.scale_shape(self.shape(), block))
        touched = [_groups(span, size) for span, size in zip((rows, columns), block, strict=True)]
        part = scale[touched[0][0] : touched[0][1], touched[1][0] : touched[1][1]]
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
    """One scale for each group of a row."""

    def __init__(self, raw: _Raw, name: str, group: int | None) -> None:
        self._raw, self._name, self._group = raw, name, group

    def shape(self) -> tuple[int, int]:
        rows, columns = (int(size) for size in self._raw.read(f"{self._name}_shape"))
        words = self._raw.shape(f"{self._name}_packed")
        if words != (rows, -(-columns // int4.PER_WORD)):
            raise ValueError(
                f"{self._raw.path}: {self._name}_packed is {list(words)}, not {[rows, columns]} packed"
            )
        return rows, columns

    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
        width = self.shape()[1]
        group = self._group or width
        scales = self._raw.shape(f"{self._name}_scale")
        if scales != (self.shape()[0], -(-width // group)):
            raise ValueError(
                f"{self._raw.path}: {self._name}_scale is {list(scales)}, not one for {group} columns"
            )
        first, last = _groups(columns, int4.PER_WORD)
        codes = int4.unpack(self._raw.part(f"{self._name}_packed", rows, (first, last)))
        start = columns[0] - first * int4.PER_WORD
        codes = codes[:, start : start + columns[1] - columns[0]]
        scale = self._raw.part(f"{self._name}_scale", rows, _groups(columns, group))
        return int4.dequantize(codes, scale, group, columns[0])

    def encoding(self) -> Encoding:
        """The shape is what the scales cover, so that no tensor has to be read."""
        rows, words = self._raw.shape(f"{self._name}_packed")
        groups = self._raw.shape(f"{self._name}_scale")[1]
        shape = rows, groups * self._group if self._group else words * int4.PER_WORD
        formats = [self._raw.dtype(f"{self._name}_{part}") for part in ("scale", "shape")]
        return Int4Encoding(self._name, shape, self._group or shape[1], *formats)


def _groups(span: tuple[int, int], size: int) -> tuple[int, int]:
    """The groups of ``size`` that a span touches: from, and up to which."""
    return span[0] // size, -(-span[1] // size)
