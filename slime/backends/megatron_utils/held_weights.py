"""What the parameters of a rank hold of the tensors of a checkpoint."""

from collections.abc import Callable, Mapping

import torch

from slime.backends.megatron_utils.named_params import partition_dim, shard_group
from slime.config.model import ModelConfig
from slime.models.blocks import Area, Block, matrix_size
from slime.models.checkpoint.load_shard import ShardSpec, copies
from slime.models.rules import Rule
from slime.training.weights import HeldTensor


def held_tensors(
    shape: ModelConfig,
    params: Mapping[str, torch.Tensor],
    rule_for: Callable[[str], Rule],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[HeldTensor]:
    """
    Args:
        params: of this rank.
        shapes: of the tensors of a checkpoint.

    Raises:
        ValueError: rows do not describe what a parameter holds, or it is not as large as they say.
    """
    found = []
    for name, param in params.items():
        dim, group = partition_dim(name, param), shard_group(name)
        shard = ShardSpec() if dim is None else ShardSpec(dim, group.rank(), group.size())
        blocks = shard_blocks(rule_for(name), shape, shapes, shard, name)
        _require_size(name, param, blocks, shape)
        found.append(HeldTensor(name, tuple(param.shape), param.dtype, blocks))
    return found


def shard_blocks(
    rule: Rule, shape: ModelConfig, shapes: Mapping[str, tuple[int, ...]], shard: ShardSpec, what: str
) -> tuple[Block, ...]:
    """What a rank's part of a parameter holds.

    Raises:
        ValueError: the rule is none of rows, or of a part of tensors.
    """
    if type(rule).merge is not Rule.merge or rule.expert is not None:
        raise ValueError(f"parameter {what!r}: holds its tensors in no order of rows")
    sizes = [matrix_size(shapes[name]) for name in rule.hf_names]
    layout, width = rule.layout([rows for rows, _ in sizes], shape), sizes[0][1]
    columns = range(width)
    if shard.dim > 0:
        part = width // shard.size
        columns = range(shard.rank * part, (shard.rank + 1) * part)
    rows = sum(segment.count for segment in layout)
    return tuple(
        Block(
            rule.hf_names[copy.source], Area(range(copy.start, copy.start + copy.rows), columns), copy.target
        )
        for copy in copies(layout, rule, rows, shard)
        if copy.source is not None
    )


def _require_size(name: str, param: torch.Tensor, blocks: tuple[Block, ...], shape: ModelConfig) -> None:
    rows, columns = matrix_size(tuple(param.shape))
    end = max((block.row + len(block.area.rows) for block in blocks), default=0)
    wide = {len(block.area.columns) for block in blocks} - {columns}
    padding = shape.padded_vocab_size - shape.vocab_size
    if wide or not end <= rows <= end + padding:
        raise ValueError(
            f"parameter {name!r}: shape {list(param.shape)} (wanted: {end} rows of tensors in it)"
        )
