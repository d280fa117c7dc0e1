"""What one optimizer step does to float32 parameters, whatever keeps their moments and wherever they lie."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Moments = Sequence[Mapping[str, torch.Tensor]]


class UpdateRule(Protocol):
    """One step for several parameters of a group, in place."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the tensors that are kept for each parameter, each of its shape and zero at first."""
        ...

    def apply(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: Moments,
        group: Mapping[str, Any],
    ) -> None:
        """Changes ``params`` and ``moments``; ``group`` has lr, weight_decay, betas, eps, step (from 1)."""
        ...


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1), on torch's fused kernel.

    Attributes:
        decoupled: whether weights decay beside the gradient (AdamW, arXiv:1711.05101) or as part of it.
    """

    decoupled: bool = True

    @property
    def moments(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def apply(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: Moments,
        group: Mapping[str, Any],
    ) -> None:
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        # The kernel only reads it, so one does for all; on CUDA it must lie beside the parameters.
        step = torch.full((), float(group["step"]), dtype=torch.float32, device=params[0].device)
        kernel(
            params,
            grads,
            [kept["exp_avg"] for kept in moments],
            [kept["exp_avg_sq"] for kept in moments],
            [],
            [step] * len(params),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


@dataclass(frozen=True)
class StatelessAdam:
    """Adam's first step, every time: p <- p - lr g / (|g| + eps), with moments that are never kept.

    Bias correction makes the moments of a first step g and g squared.
    """

    decoupled: bool = True

    @property
    def moments(self) -> tuple[str, ...]:
        return ()

    def apply(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: Moments,
        group: Mapping[str, Any],
    ) -> None:
        rate, decay = float(group["lr"]), group["weight_decay"]
        for param, grad in zip(params, grads, strict=True):
            if decay and self.decoupled:
                param.mul_(1 - rate * decay)
            elif decay:
                grad = grad.add(param, alpha=decay)
            param.addcdiv_(grad, grad.abs().add_(group["eps"]), value=-rate)


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent as torch.optim.SGD has it: b <- momentum b + g + decay p, p <- p - lr b."""

    momentum: float

    @property
    def moments(self) -> tuple[str, ...]:
        return ("exp_avg",) if self.momentum else ()

    def apply(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: Moments,
        group: Mapping[str, Any],
    ) -> None:
        for param, grad, kept in zip(params, grads, moments, strict=True):
            if group["weight_decay"]:
                grad = grad.add(param, alpha=group["weight_decay"])
            if self.momentum:
                grad = kept["exp_avg"].mul_(self.momentum).add_(grad)
            param.add_(grad, alpha=-float(group["lr"]))
