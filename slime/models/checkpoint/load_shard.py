"""Copies a rank's part of a parameter out of a checkpoint, without the whole of any tensor in memory."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from slime.config.model import ModelConfig
from slime.models.checkpoint.safetensors_dir import TensorReader
from slime.models.rules import Rule, Segment


class ShardSpec(NamedTuple):
    """The part of a parameter that tensor-parallel rank ``rank`` of ``size`` holds, split along ``dim``."""

    dim: int = 0
    rank: int = 0
    size: int = 1


class Copy(NamedTuple):
    """``rows`` rows of a tensor, or zeros, to row ``target`` of the rank's part."""

    source: int | None
    start: int
    rows: int
    target: int


def load_shard(
    param: torch.Tensor, rule: Rule, reader: TensorReader, shape: ModelConfig, shard: ShardSpec, what: str
) -> None:
    """Fills ``param`` with its part of the tensors that ``rule`` names, in its own format.

    Raises:
        ValueError: the tensors give another shape; ``what`` says in the message what for.
    """
    shapes = [reader.shape(name) for name in rule.hf_names]
    if type(rule).merge is not Rule.merge:
        _load_merged(param, rule, reader, shape, shard, what)
        return
    if any(len(size) != param.dim() or size[1:] != shapes[0][1:] for size in shapes):
        raise _misfit(reader, rule, [], param, what)
    layout = rule.layout([size[0] for size in shapes], shape)
    full = [sum(part.count for part in layout), *shapes[0][1:]]
    part = list(full)
    part[shard.dim] = -(-full[shard.dim] // shard.size)
    if part != list(param.shape) or full[shard.dim] % shard.size:
        raise _misfit(reader, rule, part, param, what)
    columns = _columns(full, shard)
    for copy in copies(layout, rule, full[0], shard):
        _copy(param, reader, rule.hf_names, copy, columns)


def _misfit(reader: TensorReader, rule: Rule, found: list[int], param: torch.Tensor, what: str) -> ValueError:
    tensors = ", ".join(f"{name} {list(reader.shape(name))}" for name in rule.hf_names)
    given = f"give {found}" if found else "do not go together"
    return ValueError(f"{reader.path}: {tensors} {given} {what}, wanted {list(param.shape)}")


def _columns(full: list[int], shard: ShardSpec) -> list[slice]:
    """What a rank holds of all dimensions but the first."""
    columns = [slice(None)] * (len(full) - 1)
    if shard.dim > 0:
        part = full[shard.dim] // shard.size
        columns[shard.dim - 1] = slice(shard.rank * part, (shard.rank + 1) * part)
    return columns


def copies(layout: list[Segment], rule: Rule, rows: int, shard: ShardSpec) -> Iterator[Copy]:
    """Yields where the rows of a rank's part come from."""
    ranges = rule.ranges(rows, shard.rank, shard.size) if shard.dim == 0 else [range(rows)]
    target = 0
    for held in ranges:
        first = 0
        for segment in layout:
            start, stop = max(held.start, first), min(held.stop, first + segment.count)
            if start < stop:
                yield Copy(segment.source, segment.start + start - first, stop - start, target)
                target += stop - start
            first += segment.count


def _copy(
    param: torch.Tensor, reader: TensorReader, names: tuple[str, ...], copy: Copy, columns: list[slice]
) -> None:
    part = param[copy.target : copy.target + copy.rows]
    if copy.source is None:
        part.zero_()
        return
    rows = range(copy.start, copy.start + copy.rows)
    reader.copy_rows(part, names[copy.source], rows, columns)


def _load_merged(
    param: torch.Tensor, rule: Rule, reader: TensorReader, shape: ModelConfig, shard: ShardSpec, what: str
) -> None:
    """Loads whole tensors, for rules whose rows are in no simple order."""
    full = rule.merge([_read(reader, name, rule.expert) for name in rule.hf_names], shape)
    if shard.dim == 0:
        ranges = rule.ranges(len(full), shard.rank, shard.size)
        part = torch.cat([full[held.start : held.stop] for held in ranges])
    else:
        part = full.chunk(shard.size, shard.dim)[shard.rank]
    if part.shape != param.shape:
        raise _misfit(reader, rule, list(part.shape), param, what)
    param.copy_(part)


def _read(reader: TensorReader, name: str, expert: int | None) -> torch.Tensor:
    """A tensor, or the part of it that belongs to an expert."""
    if expert is None:
        return reader.read(name)
    return reader.read_part(name, [slice(expert, expert + 1)])[0]
