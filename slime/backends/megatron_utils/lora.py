"""Low-rank adapters beside megatron-core's linear layers, each under the parallel layout of its layer.

A layer of several Hugging Face projections (query, key and value; gate and up) has an adapter for each.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from slime.adapters.lora import added, initial_down, product
from slime.adapters.peft_format import tensor_name
from slime.adapters.targets import ADAPTERS, is_named, is_target, no_target, without_adapter
from slime.backends.megatron_utils.latent_attention import ReplicatedLinear
from slime.backends.megatron_utils.named_params import is_expert, is_of_mtp, named_params, shard_group
from slime.config.lora import LoraConfig
from slime.config.model import ModelConfig
from slime.models import family_of
from slime.models.rules import Rule

_WEIGHT = ".weight"
_LAYERS = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


class Adapter(torch.nn.Module):
    """The adapter of one Hugging Face projection: this rank's part of A [rank, in] and B [out, rank].

    Attributes:
        module: the name of the projection.
        rows: which rows of the layer's output, as this rank has it, are the projection's, in order.
    """

    def __init__(self, module: str, down: torch.Tensor, rows: torch.Tensor) -> None:
        super().__init__()
        self.module = module
        self.rows: torch.Tensor
        self.register_buffer("rows", rows, persistent=False)
        self.lora_A = torch.nn.Parameter(down)
        self.lora_B = torch.nn.Parameter(down.new_zeros(len(rows), len(down)))


class LinearAdapters(torch.nn.Module):
    """The adapters of a linear layer, which a forward hook of it adds to its output.

    Only what has ``rank`` features crosses tensor-parallel ranks: of a column-parallel layer A is whole on
    each of them and B is split, of a row-parallel one it is the other way round. Under sequence parallelism
    what is whole meets a part of the tokens on each rank, and megatron-core sums its gradients. So it is of a
    layer that each rank has whole.

    Of an expert's layer nothing crosses here: its dispatcher brings the same tokens to all ranks of the
    expert, and sums their outputs. What is whole gets a part of its gradient on each of them.
    """

    def __init__(self, linear: Any, adapters: Sequence[Adapter], config: LoraConfig) -> None:
        super().__init__()
        self._is_row = isinstance(linear, RowParallelLinear)
        self._is_split = not isinstance(linear, ReplicatedLinear)
        self._is_expert = bool(getattr(linear, "is_expert", False))
        self._group = linear.tp_group if self._is_split else None
        of = linear if self._is_split else linear.weight
        self._sequence_parallel = of.sequence_parallel
        self._dropout, self.scale = config.lora_dropout, config.lora_scale
        self.outputs = linear.weight.size(0)
        for adapter in adapters:
            self.add_module(adapter.module.rpartition(".")[2], adapter)
            self._mark(adapter)

    def _mark(self, adapter: Adapter) -> None:
        """Tells megatron-core which parameters are split, and whose gradients are to be summed."""
        whole, split = (adapter.lora_A, adapter.lora_B)[:: -1 if self._is_row else 1]
        if self._is_expert:
            # Where each rank has experts of its own, nothing is another one's copy, which norms leave out.
            alone = self._group is not None and self._group.size() == 1
            vars(whole).update(tensor_model_parallel=alone, partition_dim=-1, partition_stride=1)
            vars(whole).update(allreduce=False)
            vars(split).update(allreduce=False)
        else:
            vars(whole).update(sequence_parallel=self._sequence_parallel)
        if self._is_split:
            dim = 1 if self._is_row else 0
            vars(split).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
        else:
            vars(split).update(sequence_parallel=self._sequence_parallel)

    def adapters(self) -> Iterator[Adapter]:
        """Yields one for each projection that has one."""
        return (child for child in self.children() if isinstance(child, Adapter))

    def down(self) -> torch.Tensor:
        """A of all projections, one below the other."""
        return torch.cat([adapter.lora_A for adapter in self.adapters()])

    def up(self) -> torch.Tensor:
        """B of all projections, each in the rows of its outputs and the columns of its own features."""
        parts = list(self.adapters())
        if len(parts) == 1 and len(parts[0].rows) == self.outputs:
            return parts[0].lora_B
        up = parts[0].lora_B.new_zeros(self.outputs, sum(part.lora_B.size(1) for part in parts))
        start = 0
        for part in parts:
            end = start + part.lora_B.size(1)
            up[part.rows, start:end] = part.lora_B
            start = end
        return up

    def added(self) -> torch.Tensor:
        """What the adapters add to the weight of the layer, as this rank has it, float32."""
        return added(self.down(), self.up(), self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapters add to the output of the layer for its input ``x``."""
        down, up = self.down(), self.up()
        if self._is_expert and self._is_row:
            up = copy_to_tensor_model_parallel_region(up, group=self._group)
        elif self._is_expert:
            down = copy_to_tensor_model_parallel_region(down, group=self._group)
        hidden = product(self._dropped(x), down) * self.scale
        return product(self._crossed(hidden), up)

    def _crossed(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._is_expert or not self._is_split:
            return hidden
        if self._is_row and self._sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden, group=self._group)
        if self._is_row:
            return reduce_from_tensor_model_parallel_region(hidden, group=self._group)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self._group)
        return copy_to_tensor_model_parallel_region(hidden, group=self._group)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        """Drops alike on ranks that have the same input, and each for itself where it is split."""
        if not (self.training and self._dropout):
            return x
        if self._is_expert:  # ranks have other experts, and as many tokens as come
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                return F.dropout(x, self._dropout)
        split = self._is_row or self._sequence_parallel
        with get_cuda_rng_tracker().fork() if split else nullcontext():
            return F.dropout(x, self._dropout)


def _add(linear: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output + linear.adapters(inputs[0])
    result, bias = output
    return result + linear.adapters(inputs[0]), bias


def attach_adapters(
    chunks: Sequence[torch.nn.Module], config: LoraConfig, shape: ModelConfig, seed: int
) -> None:
    """Freezes the model and gives its targets adapters. Collective.

    Raises:
        ValueError: a target cannot have one, or no layer is a target.
    """
    for param in (param for chunk in chunks for param in chunk.parameters()):
        param.requires_grad = False
    count = 0
    for name, linear in _linears(chunks):
        adapters = _adapters_of(name, linear, config, shape, seed)
        if adapters:
            linear.adapters = LinearAdapters(linear, adapters, config)
            linear.register_forward_hook(_add)
            count += len(adapters)
    total = torch.tensor(count, device=torch.cuda.current_device())
    dist.all_reduce(total)
    if not total:
        raise no_target(config)


def _linears(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """(global name of the weight, layer) of what may have adapters, and of what may be named and has none."""
    names = {id(param): name for name, param in named_params(chunks)}
    for chunk in chunks:
        for module in list(chunk.modules()):
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dim() == 2 and id(weight) in names:
                yield names[id(weight)], module


def _adapters_of(name: str, linear: Any, config: LoraConfig, shape: ModelConfig, seed: int) -> list[Adapter]:
    rule = family_of(shape.model_type).weights.rule_for(name, shape.num_layers)
    modules = [hf_name.removesuffix(_WEIGHT) for hf_name in rule.hf_names]
    if is_of_mtp(name) or not name.startswith("decoder.") or ".router." in name:
        named = [module for module in modules if is_named(config, module) and is_target(config, module)]
        if named:
            raise without_adapter(config, named[0])
        return []
    wanted = [is_target(config, module) for module in modules]
    if is_expert(name):  # of which all-linear is none
        wanted = [here and is_named(config, module) for here, module in zip(wanted, modules, strict=True)]
    if not any(wanted):
        return []
    if is_expert(name):
        _require_own_weights(name, rule, config, modules[0])
    elif getattr(linear, "explicit_expert_comm", False) or not isinstance(linear, _LAYERS):
        raise ValueError(
            f"--lora-rank {config.lora_rank}: {modules[0]} is a {type(linear).__name__}, which has no "
            f"adapter here (wanted: --lora-exclude-modules {modules[0].rpartition('.')[2]})"
        )
    found = zip(modules, _rows(linear, rule, shape), wanted, strict=True)
    return [_adapter(module, linear, rows, config, seed) for module, rows, is_wanted in found if is_wanted]


def _require_own_weights(name: str, rule: Rule, config: LoraConfig, module: str) -> None:
    """
    Raises:
        ValueError: the expert's weights are a part of a tensor in checkpoints, or are split otherwise.
    """
    if rule.expert is not None:
        raise without_adapter(config, module)
    size, attention = shard_group(name).size(), mpu.get_tensor_model_parallel_world_size()
    if size not in (1, attention):
        raise ValueError(
            f"--expert-tensor-parallel-size {size}: splits {module}, which has no adapter then (wanted: 1 or "
            f"{attention}, as --tensor-model-parallel-size)"
        )


def _adapter(module: str, linear: Any, rows: torch.Tensor, config: LoraConfig, seed: int) -> Adapter:
    if (rows < 0).any():
        raise ValueError(
            f"--tensor-model-parallel-size {linear.tp_group.size()}: splits {module} otherwise than into "
            "neighbouring rows, for which it has no adapter here (wanted: fewer ranks, or "
            f"--lora-exclude-modules {module.rpartition('.')[2]})"
        )
    weight = linear.weight
    inputs = weight.size(1) if isinstance(linear, ReplicatedLinear) else linear.input_size
    if weight.is_meta:
        return Adapter(module, weight.new_empty(config.lora_rank, inputs), rows)
    down = initial_down(module, config.lora_rank, inputs, seed)
    if isinstance(linear, RowParallelLinear):
        down = down.chunk(linear.tp_group.size(), dim=1)[linear.tp_group.rank()]
    return Adapter(module, down.to(weight).contiguous(), rows)


def _rows(linear: Any, rule: Rule, shape: ModelConfig) -> list[torch.Tensor]:
    """Where this rank's part of each projection is in its output; -1 for a row that another rank computes."""
    if not isinstance(linear, ColumnParallelLinear):
        return [torch.arange(linear.weight.size(0), device="cpu")]
    size, rank, total = linear.tp_group.size(), linear.tp_group.rank(), linear.output_size
    own = torch.tensor([row for part in rule.ranges(total, rank, size) for row in part], device="cpu")
    place = torch.full((total,), -1, device="cpu")
    place[own] = torch.arange(len(own), device="cpu")
    return [place[rows.chunk(size)[rank]] for rows in rule.split(torch.arange(total, device="cpu"), shape)]


def adapter_layers(chunks: Sequence[torch.nn.Module]) -> dict[str, LinearAdapters]:
    """The adapters of this rank by the global names of the weights that they add to."""
    names = {id(param): name for name, param in named_params(chunks)}
    return {
        names[id(module.weight)]: adapters
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(adapters := getattr(module, "adapters", None), LinearAdapters)
    }


def adapter_rules(shape: ModelConfig) -> Callable[[str], Rule]:
    """The rules of adapters' parameters, each of which is one tensor of PEFT's."""
    rules = family_of(shape.model_type).weights

    def rule_for(name: str) -> Rule:
        weight, projection, part = _base_name(name)
        hf_names = rules.rule_for(weight, shape.num_layers).hf_names
        modules = [hf_name.removesuffix(".weight") for hf_name in hf_names]
        (module,) = (module for module in modules if module.rpartition(".")[2] == projection)
        return Rule((tensor_name(module, part),))

    return rule_for


def _base_name(name: str) -> tuple[str, str, str]:
    """(weight of the layer, last name of the projection, lora_A or lora_B) of a parameter of an adapter."""
    layer, _, rest = name.partition(ADAPTERS)
    projection, _, part = rest.rpartition(".")
    return layer + _WEIGHT, projection, part
