"""Optimizers over the shards of FSDP2, with Megatron-LM's rule of decay."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from slime.config.backend import BackendConfig


def build_optimizer(config: BackendConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer of ``--optimizer``; norms and biases do not decay.

    The schedule multiplies a group's decay by its ``wd_mult``.
    """
    params = [
        (_decays(name, param), param) for name, param in model.named_parameters() if param.requires_grad
    ]
    groups = [
        {"params": [param for decays, param in params if decays], "wd_mult": 1.0},
        {"params": [param for decays, param in params if not decays], "wd_mult": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    lr, adam = config.optimizer.lr, config.megatron
    if config.optimizer.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.optimizer.sgd_momentum)
    kind = torch.optim.AdamW if adam.decoupled_weight_decay else torch.optim.Adam
    betas = adam.adam_beta1, adam.adam_beta2
    return kind(groups, lr=lr, betas=betas, eps=adam.adam_eps, fused=True)


def _decays(name: str, param: torch.Tensor) -> bool:
    """Biases of experts are stacked to matrices."""
    return param.dim() != 1 and not name.endswith("bias")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, in the memory of the parameter."""
    shard: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return shard.detach()


def ensure_states(optimizer: torch.optim.Optimizer) -> None:
    """Moments of zero where no step has made any."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state[param]:
                optimizer.state[param].update(_first_state(param, group))


def _first_state(param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if "momentum" in group:
        return {"momentum_buffer": torch.zeros_like(param)} if group["momentum"] else {}
    step = torch.zeros((), dtype=torch.float32, device=param.device)
    return {"step": step, **{name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}}


@torch.no_grad()
def reset_states(optimizer: torch.optim.Optimizer) -> None:
    """Zeroes the moments and the step count (``--reset-optimizer-states``)."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


@torch.no_grad()
def gradient_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> float:
    """The 2-norm over all parameters and ranks.

    Args:
        gradients: this rank's shards.
    """
    squares = [torch.linalg.vector_norm(gradient.float()).square() for gradient in gradients]
    total = torch.stack(squares).sum().to(device) if squares else torch.zeros((), device=device)
    dist.all_reduce(total)
    return float(total.sqrt())


@torch.no_grad()
def scale(gradients: Iterable[torch.Tensor], factor: float) -> None:
    tensors = list(gradients)
    if tensors and factor != 1:
        torch._foreach_mul_(tensors, factor)


def clip_factor(norm: float, largest: float) -> float:
    """What gradients of this norm are multiplied by; Megatron-LM's and torch's rule. 0 clips nothing."""
    return min(1.0, largest / (norm + 1e-6)) if largest > 0 else 1.0
