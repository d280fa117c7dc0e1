"""Trainer ranks without processes: what each holds of a checkpoint, by the rules of its family.

Ranks count as megatron-core's: tensor-parallel ones are neighbours, then copies, then pipeline stages.
Experts are spread over all ranks of a stage, whole.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slime.backends.megatron_utils.held_weights import shard_blocks
from slime.models import family_of
from slime.models.checkpoint.load_shard import ShardSpec, load_shard
from slime.training.weights import HeldTensor

_DIMS = {"linear_qkv": 0, "linear_fc1": 0, "linear_proj": 1, "linear_fc2": 1, "word_embeddings": 0}
_DIMS |= {"output_layer": 0}


class Tensors:
    """A checkpoint in memory, as `load_shard` reads one."""

    path = "memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def copy_rows(self, target: torch.Tensor, name: str, rows: range, columns: list[slice]) -> None:
        target.copy_(self._tensors[name][(slice(rows.start, rows.stop), *columns)])


@dataclass
class Ranks:
    """What ranks hold, and the values of that."""

    held: dict[int, list[HeldTensor]]
    values: dict[int, dict[str, torch.Tensor]]


def pretended_ranks(
    state: Mapping[str, torch.Tensor], args: Any, tensor: int, pipeline: int = 1, copies: int = 1
) -> Ranks:
    rules, shapes = family_of(args.model_type).weights, {name: tuple(t.shape) for name, t in state.items()}
    absent, reader = rules.absent(args), Tensors(state)
    found = Ranks({}, {})
    layers = args.num_layers // pipeline
    width = tensor * copies
    for rank in range(width * pipeline):
        stage, place = divmod(rank, width)
        held, values = [], {}
        for name in _names(args, rules, absent):
            layer = re.search(r"layers\.(\d+)\.", name)
            own_stage = int(layer[1]) // layers if layer else (0 if "embedding" in name else pipeline - 1)
            expert = re.search(r"local_experts\.(\d+)\.", name)
            if own_stage != stage or (expert and int(expert[1]) * width // args.num_experts != place):
                continue
            dim = None if expert else next((d for part, d in _DIMS.items() if part in name), None)
            shard = ShardSpec() if dim is None else ShardSpec(dim, place % tensor, tensor)
            rule = rules.rule_for(name, args.num_layers)
            value = torch.empty(_size(rule, reader, args, shard), dtype=state[rule.hf_names[0]].dtype)
            load_shard(value, rule, reader, args, shard, name)
            blocks = shard_blocks(rule, args, shapes, shard, name)
            held.append(HeldTensor(name, tuple(value.shape), value.dtype, blocks))
            values[name] = value
        found.held[rank], found.values[rank] = held, values
    return found


def _names(args: Any, rules: Any, absent: set[str]) -> list[str]:
    names = [name for name in rules.of_model if name not in absent]
    for layer in range(args.num_layers):
        inner = rules._names_in_layer(args, layer)
        names += [f"decoder.layers.{layer}.{name}" for name in inner if name not in absent]
    return names


def _size(rule: Any, reader: Tensors, args: Any, shard: ShardSpec) -> list[int]:
    shapes = [reader.shape(name) for name in rule.hf_names]
    size = [sum(part.count for part in rule.layout([s[0] for s in shapes], args)), *shapes[0][1:]]
    size[shard.dim] //= shard.size
    return size
