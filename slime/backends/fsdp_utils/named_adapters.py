"""Several adapters on one base, in this rank's shards and the optimizer over them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime.backends.fsdp_utils.lora import adapters_of
from slime.backends.fsdp_utils.loss_scale import LossScale
from slime.backends.fsdp_utils.lr_scheduler import FSDPLRScheduler
from slime.backends.fsdp_utils.optimizer import local
from slime.training.named_adapters import NamedAdapters, set_group, settings_of


@dataclass
class _Progress:
    """What optimizer, schedule and loss scale know of an adapter beside its weights."""

    moments: Any
    groups: list[dict[str, Any]]
    samples: int
    loss_scale: dict[str, Any]


class FsdpAdapters(NamedAdapters[_Progress]):
    """The adapters of one rank."""

    def __init__(
        self,
        names: Sequence[str],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: FSDPLRScheduler,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._optimizer, self._scheduler, self._loss_scale = optimizer, scheduler, loss_scale
        params = [param for adapter in adapters_of(model).values() for _, param in adapter.parts()]
        super().__init__(names, lambda: map(local, params))  # FSDP moves shards in its first pass

    def _fresh(self) -> _Progress:
        return self._known(defaultdict(dict))

    def _known(self, moments: Any) -> _Progress:
        groups = [settings_of(group) for group in self._optimizer.param_groups]
        scale = {} if self._loss_scale is None else self._loss_scale.state_dict()
        return _Progress(moments, groups, self._scheduler.num_steps, scale)

    def _swap_optimizer(self, name: str, coming: _Progress) -> _Progress:
        going = self._known(self._optimizer.state)
        self._optimizer.state = coming.moments
        for group, settings in zip(self._optimizer.param_groups, coming.groups, strict=True):
            set_group(group, settings)
        self._scheduler.num_steps = coming.samples
        if self._loss_scale is not None:
            self._loss_scale.load_state_dict(coming.loss_scale)
        return going

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for progress in self._progress.values():
            for state in progress.moments.values():
                yield from map(local, state.values())
