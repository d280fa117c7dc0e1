"""Adam for megatron-core where neither TransformerEngine nor Apex brings one, on CPU and CUDA alike.

megatron-core then falls back to ``torch.optim.AdamW``, which keeps its step count in the state of every
parameter. Its distributed optimizer cannot load the checkpoints that it writes with that.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slime.utils.accelerator import has_gpu


def install() -> None:
    """Puts `FusedAdam` in the place of megatron-core's fallback; a real fused Adam for the GPU stays."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if has_gpu() and not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    # The branches that megatron-core takes when TransformerEngine provides Adam.
    replaced: tuple[tuple[Any, dict[str, Any]], ...] = (
        (optimizer, {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False}),
        (distrib_optimizer, {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}),
    )
    for module, names in replaced:
        vars(module).update(names)


class FusedAdam(torch.optim.Optimizer):
    """Adam with the interface and the state layout of TransformerEngine's FusedAdam, on torch's own kernel.

    ``step`` is kept in the parameter group, and the state holds ``exp_avg`` and ``exp_avg_sq`` only.

    Raises:
        ValueError: ``amsgrad`` or no bias correction, which the kernel does not offer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **_: Any,
    ) -> None:
        if amsgrad or not bias_correction:
            raise ValueError("FusedAdam: wanted bias_correction=True and amsgrad=False")
        self.adam_w_mode = adam_w_mode
        defaults = {
            **{"lr": lr, "bias_correction": bias_correction, "betas": betas},
            **{"eps": eps, "weight_decay": weight_decay},
        }
        super().__init__(params, defaults)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        self.state[param]["exp_avg"] = torch.zeros_like(param.data)
        self.state[param]["exp_avg_sq"] = torch.zeros_like(param.data)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None and p.numel()]
        if not params:
            return
        for param in params:
            if not self.state[param]:
                self.initialize_state(param)
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        # The kernel only reads it, so one does for all; on CUDA it must lie beside the parameters.
        step = torch.full((), float(group["step"]), dtype=torch.float32, device=params[0].device)
        kernel(
            params,
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
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
