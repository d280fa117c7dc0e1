"""What a rank keeps between micro-batches: weights, gradients and the optimizer's state."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from slime.adapters.targets import is_of_adapter
from slime.check.layout import Layout
from slime.check.parameters import Parameter
from slime.config.memory import MemoryConfig
from slime.config.trainer import TrainerConfig
from slime.models.families.deepseek_v32 import is_of_indexer

GATHERED = 12
"""megatron-core saves weight and both moments of every trained element in float32."""
_ALIGNED = 64
"""megatron-core begins each parameter at a multiple of so many elements of its buffer."""
_SHARDS = 128
"""The end of a buffer is padded to a multiple of this, and of its ranks."""
_BUSBW = 2**16
"""A multiple of this is padded to with ``--ddp-pad-buckets-for-high-nccl-busbw``."""


@dataclass(frozen=True)
class States:
    """Bytes on one GPU; ``host`` is what ``--optimizer-cpu-offload`` keeps beside it.

    Attributes:
        trained: elements that the optimizer changes.
        kept: of the weights that checkpoints and versions hold: adapters where there are any, else all.
        stored: this rank's part of a checkpoint with the optimizer's state.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int = 0
    trained: int = 0
    kept: int = 0
    stored: int = 0

    def __add__(self, other: "States") -> "States":
        return States(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Formats:
    """Bytes of an element: weight, gradient, main weight where that is a copy, and both moments."""

    weight: int
    gradient: int
    main: int
    moments: int


def formats(config: MemoryConfig) -> Formats:
    """What the flags about precision and the optimizer say."""
    precision = config.precision
    weight = precision.params_dtype.itemsize
    wide = precision.accumulate_allreduce_grads_in_fp32 or (
        precision.bf16 and not precision.grad_reduce_in_bf16
    )
    return Formats(weight, 4 if wide else weight, 0 if weight == 4 else 4, moments(config))


def moments(config: MemoryConfig) -> int:
    """Bytes of what the optimizer remembers of an element."""
    if config.optimizer.use_stateless_adam:
        return 0
    if config.optimizer.optimizer == "sgd":
        return 4 if config.optimizer.sgd_momentum else 0
    if not config.optimizer_state.use_precision_aware_optimizer:
        return 8
    return sum(
        2 if kind == "bf16" else 4
        for kind in (config.optimizer_state.exp_avg_dtype, config.optimizer_state.exp_avg_sq_dtype)
    )


def rank_states(config: MemoryConfig, layout: Layout, chunks: Sequence[Sequence[Parameter]]) -> States:
    """Counts the states of a rank with these model chunks: each has a buffer of its experts, and one of all
    else.
    """
    total, adapts = States(0, 0, 0), any(is_of_adapter(p.name) for chunk in chunks for p in chunk)
    for chunk in chunks:
        for experts, ranks in ((False, layout.dp * layout.cp), (True, layout.edp)):
            total += _buffer(config, [p for p in chunk if (p.kind == "experts") == experts], ranks, adapts)
    return total


def sharded_states(config: MemoryConfig, parameters: int, adapters: int, ranks: int) -> States:
    """What a rank of the FSDP trainer keeps: its part of every weight, gradient and moment, in float32.

    Args:
        adapters: parameters of adapters beside the others, which do not train where there are any.
    """
    mine = -(-(adapters or parameters) // ranks)
    weights, gradients, kept = 4 * -(-(parameters + adapters) // ranks), 4 * mine, mine * moments(config)
    if config.fsdp.fsdp_cpu_offload:
        return States(0, 0, 0, host=weights + gradients + kept, stored=gradients + kept)
    return States(weights, gradients, kept, kept=4 * mine, stored=gradients + kept)


def _buffer(config: MemoryConfig, parameters: Sequence[Parameter], ranks: int, adapts: bool) -> States:
    kinds = formats(config)
    trained = [
        p for p in parameters if (is_of_adapter(p.name) if adapts else _trains(config.trainer, p.name))
    ]
    count = sum(p.elements * p.count for p in trained)
    frozen = sum(p.elements * p.count for p in parameters) - count
    padded = _padded(trained, ranks, config.megatron.pad_buckets_for_high_nccl_busbw)
    mine = -(-count // ranks)
    away = round(
        mine
        * (
            config.optimizer_state.optimizer_offload_fraction
            if config.optimizer_state.optimizer_cpu_offload
            else 0
        )
    )
    weights = (padded + frozen) * kinds.weight
    kept = count * kinds.weight if adapts else weights
    return States(
        weights=weights,
        gradients=padded * kinds.gradient,
        optimizer=mine * kinds.main + (mine - away) * kinds.moments,
        host=away * (kinds.moments + 8),  # weights and gradients pass through buffers of float32
        trained=count,
        kept=kept,
        stored=-(-(kept + GATHERED * count) // ranks),
    )


def _padded(parameters: Iterable[Parameter], ranks: int, for_busbw: bool) -> int:
    elements = sum(-(-p.elements // _ALIGNED) * _ALIGNED * p.count for p in parameters)
    multiple = math.lcm(ranks, _SHARDS, _BUSBW if for_busbw else 1)
    return -(-elements // multiple) * multiple


def _trains(config: TrainerConfig, name: str) -> bool:
    """Whether flags leave a parameter to be trained; a value head always is."""
    if config.freeze_indexer and is_of_indexer(name):
        return False
    only, frozen = config.only_train_params_name_list, config.freeze_params_name_list
    patterns = only or frozen
    if not patterns:
        return True
    return any(re.search(pattern, name) for pattern in patterns) == bool(only)
