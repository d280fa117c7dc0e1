"""Adam without moments as an optimizer of torch, for plug-ins that make one themselves."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from slime.backends.megatron_utils.update_rules import StatelessAdam as Rule


class StatelessAdam(torch.optim.Optimizer):
    """Each step is taken as if both moments were zero: p <- p - lr a g / (b |g| + eps).

    With bias correction a = b = 1, else a = 1 - beta1 and b = sqrt(1 - beta2).

    Args:
        adam_w_mode: weights decay by themselves, not through the gradient.
        more: options of other optimizers, which have no effect.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        **more: Any,
    ) -> None:
        if amsgrad:
            raise ValueError("amsgrad: keeps a maximum over steps (wanted: an optimizer with moments)")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction})
        self._rule = Rule(decoupled=adam_w_mode)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Moves all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            self._rule.apply(params, [param.grad for param in params], [], self._scaled(group))
        return loss

    def _scaled(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with a and b as another rate: a g / (b |g| + eps) = (a / b) g / (|g| + eps / b)."""
        if group["bias_correction"]:
            return group
        beta1, beta2 = group["betas"]
        a, b = 1 - beta1, math.sqrt(1 - beta2)
        decay = group["weight_decay"] * b / a if self._rule.decoupled else group["weight_decay"]
        return {**group, "lr": group["lr"] * a / b, "eps": group["eps"] / b, "weight_decay": decay}
