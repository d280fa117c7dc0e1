"""Adam for megatron-core where neither TransformerEngine nor Apex brings one, on CPU and CUDA alike.

megatron-core then falls back to ``torch.optim.AdamW``, which keeps its step count in the state of every
parameter. Its distributed optimizer cannot load the checkpoints that it writes with that.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from slime.backends.megatron_utils.moment_storage import HostSteps, MomentStorage
from slime.backends.megatron_utils.update_rules import Adam, UpdateRule
from slime.utils.accelerator import has_gpu


def install(instead_of_any: bool = False) -> None:
    """Puts `FusedAdam` in the place of megatron-core's fallback; a real fused Adam for the GPU stays.

    Args:
        instead_of_any: it does not stay either.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if has_gpu() and not optimizer.USING_PYTORCH_OPTIMIZER and not instead_of_any:
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

    ``step`` is kept in the parameter group, and the state holds ``exp_avg`` and ``exp_avg_sq`` only. After
    `arrange` it may follow another rule than Adam's, and keep moments elsewhere.

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
        defaults = {
            **{"lr": lr, "bias_correction": bias_correction, "betas": betas},
            **{"eps": eps, "weight_decay": weight_decay},
        }
        self.rule: UpdateRule = Adam(decoupled=adam_w_mode)
        self.storage = MomentStorage()
        self._on_host: set[torch.Tensor] = set()
        super().__init__(params, defaults)

    def arrange(self, rule: UpdateRule, storage: MomentStorage) -> None:
        """Sets what a step does and where moments are kept; before the first step."""
        self.rule, self.storage = rule, storage
        params = [param for group in self.param_groups for param in group["params"]]
        self._on_host = set(storage.offloaded(params))
        self._host_steps = HostSteps(storage)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        for name in self.rule.moments:
            self.state[param][name] = self.storage.zeros(param, name, param in self._on_host)

    def initialize_states(self) -> None:
        """Moments of zero for every parameter that has none."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param)

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
        for param in params:
            if not self.state[param]:
                self.initialize_state(param)
        here = [p for p in params if p not in self._on_host]
        if here:
            self._apply(here, [p.grad for p in here], [self.state[p] for p in here], group)
        away = [p for p in params if p in self._on_host]
        if away:
            self._host_steps.step(
                away,
                [p.grad for p in away],
                [self.state[p] for p in away],
                lambda params, grads, moments: self._apply(params, grads, moments, group),
            )

    def _apply(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: Any,
        group: Mapping[str, Any],
    ) -> None:
        """A step with float32 moments, those of other formats being widened for it."""
        wide = [{name: moment.float() for name, moment in kept.items()} for kept in moments]
        self.rule.apply(params, grads, wide, group)
        for kept, values in zip(moments, wide, strict=True):
            for name, moment in kept.items():
                if values[name] is not moment:
                    moment.copy_(values[name])

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state like torch's optimizers, but moments go to where they are kept, in the format that
        they are kept in.
        """
        saved_groups = state_dict["param_groups"]
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for param, index in zip(group["params"], saved["params"], strict=True):
                self._load_moments(param, state_dict["state"].get(index) or {})
            params = group["params"]
            group.clear()
            group.update({**saved, "params": params})

    def _load_moments(self, param: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        kept = self.state[param] if values else {}
        for name in self.rule.moments if values else ():
            if kept.get(name) is values[name]:
                continue
            if name not in kept:
                kept[name] = self.storage.zeros(param, name, param in self._on_host)
            kept[name].copy_(values[name])
