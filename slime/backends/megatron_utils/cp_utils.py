"""Context parallelism for plug-ins: laid out as in the trainer, elsewhere as megatron-core's ``mpu`` says.

``mpu`` is an attribute of this module, for those who replace it. megatron-core is imported when it is first
asked for: where nobody has imported it, there is a single rank.
"""

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from slime.training import cp_plugins
from slime.training.cp_plugins import slice_log_prob_with_cp
from slime.training.losses.reducers import Reducer
from slime.training.parallel import ParallelContext

__all__ = [
    "all_gather_with_cp",
    "get_logits_and_tokens_offset_with_cp",
    "get_sum_of_sample_mean",
    "slice_log_prob_with_cp",
]


def held_mpu(module: str, name: str) -> Any:
    """Returns ``mpu``, as ``from megatron.core import mpu`` would have it in a module that does not."""
    if name != "mpu":
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return importlib.import_module("megatron.core").mpu


__getattr__ = partial(held_mpu, __name__)


def context_by(module: str, gathers: bool = False, whitens: bool = False) -> ParallelContext:
    """Returns the trainer's layout, else what the ``mpu`` says that a module holds now.

    Args:
        gathers: whether values are gathered over the context-parallel group.
        whitens: whether values are summed over the batch.
    """
    trainer, holder = ParallelContext.of_trainer(), sys.modules[module]
    if trainer is not None or not ("mpu" in vars(holder) or "megatron.core" in sys.modules):
        return trainer or ParallelContext()
    mpu = holder.mpu
    size = mpu.get_context_parallel_world_size()
    if not size:  # before torch.distributed is initialized
        return ParallelContext()
    shared = mpu.get_data_parallel_group() if whitens else None
    if size == 1:
        return ParallelContext(dp_group=shared)
    group = mpu.get_context_parallel_group() if gathers else None
    return ParallelContext(
        dp_group=shared, cp_group=group, cp_rank=mpu.get_context_parallel_rank(), cp_size=size
    )


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """See `slime.training.cp_plugins.all_gather_with_cp`."""
    return cp_plugins.all_gather_with_cp(
        tensor, total_length, response_length, context_by(__name__, gathers=True)
    )


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int
) -> tuple[int, tuple[cp_plugins.Range, cp_plugins.Range], Any, Any]:
    """See `slime.training.cp_plugins.get_logits_and_tokens_offset_with_cp`."""
    return cp_plugins.get_logits_and_tokens_offset_with_cp(
        total_length, response_length, context_by(__name__)
    )


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
) -> Reducer:
    """See `slime.training.cp_plugins.get_sum_of_sample_mean`."""
    return cp_plugins.get_sum_of_sample_mean(
        *(total_lengths, response_lengths, loss_masks, sample_denoms, calculate_per_token_loss),
        context_by(__name__),
    )
