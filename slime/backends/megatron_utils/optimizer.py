"""The distributed optimizer and its schedule, from ``args``."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.training.optimizer_schedule import schedule_settings


def ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    """Gradient buffers and their reduction."""
    values = _fields_from_args(DistributedDataParallelConfig, args)
    values.update(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=_reduces_in_float32(args),
        check_for_nan_in_grad=refuses_nan(args),
    )
    return DistributedDataParallelConfig(**values)


def refuses_nan(args: Namespace) -> bool:
    """Whether NaN or Inf in the gradients ends the run; float16 skips such steps to find its loss scale."""
    ignored = getattr(args, "no_check_for_nan_in_loss_and_grad", False)
    return not ignored and args.params_dtype != torch.float16


def _reduces_in_float32(args: Namespace) -> bool:
    """Megatron-LM's rule: bfloat16 gradients are summed in float32 unless told otherwise."""
    if getattr(args, "accumulate_allreduce_grads_in_fp32", False):
        return True
    return args.params_dtype == torch.bfloat16 and not getattr(args, "grad_reduce_in_bf16", False)


def optimizer_config(args: Namespace) -> OptimizerConfig:
    values = _fields_from_args(OptimizerConfig, args)
    values.update(
        use_distributed_optimizer=True,
        params_dtype=args.params_dtype,
        bf16=args.params_dtype == torch.bfloat16,
        fp16=args.params_dtype == torch.float16,
    )
    return OptimizerConfig(**values)


def _fields_from_args(config_class: type, args: Namespace) -> dict[str, Any]:
    names = [field.name for field in fields(config_class) if field.init]
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def build_optimizer(args: Namespace, model: Sequence[torch.nn.Module]) -> MegatronOptimizer:
    """Adam with its state sharded over the data-parallel ranks; norms and biases do not decay."""
    config = optimizer_config(args)
    return get_megatron_optimizer(config, list(model), config_overrides=get_standard_config_overrides(config))


def build_scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay over the run."""
    return OptimizerParamScheduler(optimizer, **vars(schedule_settings(args)))


def ensure_optimizer_states(optimizer: MegatronOptimizer) -> None:
    """Moments of zero where no step has made any, as while float16 still looks for its loss scale."""
    for part in _parts(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)


@torch.no_grad()
def reset_optimizer_states(optimizer: MegatronOptimizer) -> None:
    """Zeroes the moments and the step count of Adam (``--reset-optimizer-states``)."""
    for part in _parts(optimizer):
        torch_optimizer = part.optimizer
        for state in torch_optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        for group in torch_optimizer.param_groups:
            if "step" in group:
                group["step"] = 0


def _parts(optimizer: MegatronOptimizer) -> Sequence[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])
