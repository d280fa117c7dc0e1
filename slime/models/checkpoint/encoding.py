"""A weight as a quantised checkpoint stores it: what stands in its place, and how to get there and back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from slime.models.checkpoint import fp8, int4, mxfp4, mxfp8
from slime.models.checkpoint.safetensors_file import Spec

# Of float32, at once.
_STRIP_BYTES = 32 * 1024**2


class Encoding(Protocol):
    """How one weight is stored.

    Attributes:
        shape: of the weight.
        scale_name: of the tensor that holds its scales.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def scale_name(self) -> str: ...

    def specs(self) -> dict[str, Spec]:
        """The tensors that stand in the place of the weight."""

    def encode(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Encodes a weight, on its device.

        Args:
            scales: of a checkpoint, on that device; groups keep theirs where `is_kept` says so.

        Raises:
            ValueError: a number is not finite.
        """

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weight in float32."""


@dataclass(frozen=True)
class Fp8Encoding:
    """Float8 and the scales of its blocks.

    Attributes:
        name: of the weight, under which the float8 numbers are.
        block: rows and columns that share a scale.
        scale_name, scale: name, format and shape of the scales.
        power_of_two: whether they are powers of two.
    """

    name: str
    shape: tuple[int, int]
    block: tuple[int, int]
    scale_name: str
    scale: Spec
    power_of_two: bool

    def specs(self) -> dict[str, Spec]:
        return {self.name: (fp8.FLOAT8, self.shape), self.scale_name: self.scale}

    def encode(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        codes = torch.empty(self.shape, dtype=fp8.FLOAT8, device=weight.device)
        wanted = fp8.scale_shape(self.shape, self.block)
        stored = None if scales is None else scales.float().view(wanted)
        found = torch.empty(wanted, dtype=torch.float32, device=weight.device)
        for at, strip in _strips(self.shape, self.block[0]):
            own = None if stored is None else stored[at]
            codes[strip], found[at] = fp8.quantize(weight[strip], self.block, self.power_of_two, own)
        return {self.name: codes, self.scale_name: found.to(self.scale[0]).view(self.scale[1])}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows, columns = self.shape
        scale = parts[self.scale_name].view(fp8.scale_shape(self.shape, self.block))
        return fp8.dequantize(parts[self.name], scale, self.block, (0, rows), (0, columns))


@dataclass(frozen=True)
class Int4Encoding:
    """Integers of 4 bits, packed, and the scales of their groups.

    Attributes:
        name: of the weight, with which the names of the tensors begin.
        group: neighbours in a row that share a scale.
        scale_dtype, shape_dtype: formats of the scales, and of what tells the shape.
    """

    name: str
    shape: tuple[int, int]
    group: int
    scale_dtype: torch.dtype
    shape_dtype: torch.dtype = torch.int64

    @property
    def scale_name(self) -> str:
        return f"{self.name}_scale"

    def specs(self) -> dict[str, Spec]:
        rows, columns = self.shape
        return {
            f"{self.name}_packed": (torch.int32, (rows, math.ceil(columns / int4.PER_WORD))),
            self.scale_name: (self.scale_dtype, (rows, math.ceil(columns / self.group))),
            f"{self.name}_shape": (self.shape_dtype, (2,)),
        }

    def encode(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        names = list(self.specs())
        parts = _empty(self.specs(), weight.device)
        for _, strip in _strips(self.shape, 1):
            own = None if scales is None else scales[strip]
            words, scale = int4.quantize(weight[strip], self.group, self.scale_dtype, own)
            parts[names[0]][strip], parts[names[1]][strip] = words, scale
        parts[names[2]].copy_(torch.tensor(self.shape))
        return parts

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Raises ValueError if what tells the shape tells another one."""
        packed, scale, shape = (parts[name] for name in self.specs())
        if shape.tolist() != list(self.shape):
            raise ValueError(f"{self.name}_shape is {shape.tolist()} (wanted: {list(self.shape)})")
        codes = int4.unpack(packed)[:, : self.shape[1]]
        return int4.dequantize(codes, scale, self.group, 0)


@dataclass(frozen=True)
class Mxfp4Encoding:
    """The matrices of all experts of a layer, each transposed, in numbers of 4 bits and scales of groups.

    Attributes:
        name: of the weight, with which the names of the tensors begin.
        shape: [experts, inputs, outputs], of which neighbours among inputs share a scale.
    """

    name: str
    shape: tuple[int, int, int]

    @property
    def scale_name(self) -> str:
        return f"{self.name}_scales"

    def specs(self) -> dict[str, Spec]:
        experts, inputs, outputs = self.shape
        groups = math.ceil(inputs / mxfp4.GROUP)
        return {
            f"{self.name}_blocks": (torch.uint8, (experts, outputs, groups, mxfp4.BYTES)),
            self.scale_name: (torch.uint8, (experts, outputs, groups)),
        }

    def encode(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        parts = _empty(self.specs(), weight.device)
        blocks, found = parts.values()
        for expert, matrix in enumerate(weight.transpose(1, 2)):
            for _, strip in _strips((matrix.shape[0], matrix.shape[1]), 1):
                own = None if scales is None else scales[expert, strip]
                blocks[expert, strip], found[expert, strip] = mxfp4.quantize(matrix[strip], own)
        return parts

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Raises ValueError if a number is not finite."""
        blocks, scales = (parts[name] for name in self.specs())
        weight = torch.empty(self.shape, device=blocks.device)
        try:
            for expert, matrix in enumerate(weight):
                matrix.copy_(mxfp4.dequantize(blocks[expert], scales[expert]).T)
        except ValueError as error:
            raise ValueError(f"weight {self.name!r}: {error}") from error
        return weight


@dataclass(frozen=True)
class Mxfp8Encoding:
    """Float8 and the scales of its groups, which are powers of two in bytes.

    Attributes:
        name: of the weight, under which the float8 numbers are.
    """

    name: str
    shape: tuple[int, int]

    @property
    def scale_name(self) -> str:
        return f"{self.name}_scale_inv"

    def specs(self) -> dict[str, Spec]:
        """Raises ValueError if rows are not made up of whole groups."""
        rows, columns = self.shape
        try:
            mxfp8.require_groups(columns)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        return {
            self.name: (fp8.FLOAT8, self.shape),
            self.scale_name: (torch.uint8, (rows, columns // mxfp8.GROUP)),
        }

    def encode(self, weight: torch.Tensor, scales: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        parts = _empty(self.specs(), weight.device)
        codes, found = parts.values()
        for _, strip in _strips(self.shape, 1):
            own = None if scales is None else scales[strip]
            codes[strip], found[strip] = mxfp8.quantize(weight[strip], own)
        return parts

    def decode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Raises ValueError if a number is not finite."""
        codes, scales = (parts[name] for name in self.specs())
        try:
            return mxfp8.dequantize(codes, scales)
        except ValueError as error:
            raise ValueError(f"weight {self.name!r}: {error}") from error


def _empty(specs: Mapping[str, Spec], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in specs.items()}


def _strips(shape: tuple[int, int], rows: int) -> list[tuple[slice, slice]]:
    """Rows of blocks and rows of the matrix that are converted at once, so many that memory is bounded.

    Args:
        rows: of a block.
    """
    step = max(1, _STRIP_BYTES // max(1, 4 * rows * shape[1]))
    blocks = range(0, math.ceil(shape[0] / rows), step)
    return [(slice(at, at + step), slice(at * rows, (at + step) * rows)) for at in blocks]
