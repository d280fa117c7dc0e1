"""The weights of a checkpoint directory, quantised or not, under the names that a model has."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from slime.models.checkpoint.encoded_weights import EncodedWeight, encoded_weights, plain_names
from slime.models.checkpoint.encoding import Encoding
from slime.models.checkpoint.expert_forms import stacks_of
from slime.models.checkpoint.quantization import read_quantization
from slime.models.checkpoint.safetensors_dir import SafetensorReader
from slime.models.hf_config import HfConfig

# Rows that are dequantised at once.
_BLOCK_BYTES = 8 * 1024**2


class WeightsReader:
    """Reads like `SafetensorReader`. Quantised weights are read in float32, dequantised, under the plain
    names.

    Experts that the checkpoint has one by one, and the family in one tensor for each layer, are read so.

    Attributes:
        stacks: by name these tensors; for each expert the matrices in its rows.

    Raises:
        ValueError: see `SafetensorReader`; the weights are quantised in a way that is not read; or a tensor
            that is lacks its scale.
    """

    def __init__(self, path: str | Path) -> None:
        self._raw = SafetensorReader(path)
        self.path = self._raw.path
        config = HfConfig.read(path) if (self.path / "config.json").is_file() else None
        self.quantization = None if config is None else read_quantization(config)
        self._encoded: dict[str, EncodedWeight] = {}
        self.stacks: dict[str, list[tuple[str, ...]]] = {}
        self._names = self._raw.names()
        if self.quantization is not None:
            self._encoded = dict(encoded_weights(self._raw, self.quantization))
            plain = plain_names(self._names, self.quantization)
            self._names = list(dict.fromkeys([*plain, *self._encoded]))
        if config is not None:
            self.stacks = self._find_stacks(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raw.__exit__(kind, error, trace)

    def open_all(self) -> None:
        self._raw.open_all()

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
        encoded = self._encoded.get(name)
        return self._raw.file_of(name if encoded is None else encoded.stored)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.read(name)) for name in self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.stacks:
            experts = self.stacks[name]
            rows = sum(self.shape(part)[0] for part in experts[0])
            return len(experts), rows, self.shape(experts[0][0])[1]
        encoded = self._encoded.get(name)
        return self._raw.shape(name) if encoded is None else encoded.shape()

    def dtype(self, name: str) -> torch.dtype:
        if name in self.stacks:
            return self.dtype(self.stacks[name][0][0])
        return torch.float32 if name in self._encoded else self._raw.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        if name in self.stacks:
            return self.read_part(name, [slice(None)])
        if name not in self._encoded:
            return self._raw.read(name)
        whole = torch.empty(self.shape(name))
        step = max(1, _BLOCK_BYTES // max(1, whole[0].nbytes))
        for start in range(0, len(whole), step):
            whole[start : start + step] = self.read_part(name, [slice(start, start + step)])
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
            return self._raw.read_part(name, box)
        shape = encoded.shape()
        full = [*box, *[slice(None)] * (len(shape) - len(box))]
        return encoded.part([part.indices(size)[:2] for part, size in zip(full, shape, strict=True)])

    def copy_rows(self, target: torch.Tensor, name: str, rows: range, columns: Sequence[slice]) -> None:
        if name not in self._encoded and name not in self.stacks:
            self._raw.copy_rows(target, name, rows, columns)
            return
        step = max(1, _BLOCK_BYTES * len(rows) // max(1, target.numel() * 4))
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            target[at : at + step].copy_(self.read_part(name, [slice(part.start, part.stop), *columns]))

    def _find_stacks(self, config: HfConfig) -> dict[str, list[tuple[str, ...]]]:
        """Finds by name the matrices of each expert, whose names replace those of the stacks."""
        try:
            stacks = stacks_of(self._names, config)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        taken = {part for experts in stacks.values() for parts in experts for part in parts}
        self._names = [name for name in self._names if name not in taken] + list(stacks)
        return stacks
