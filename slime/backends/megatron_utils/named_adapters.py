"""Several adapters on one base, in the model and the optimizer of megatron-core."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.backends.megatron_utils.lora_checkpoint import adapter_params
from slime.backends.megatron_utils.optimizer import real_parts
from slime.training.named_adapters import NamedAdapters, Swapped, set_group, settings_of


@dataclass
class _Progress:
    """What an optimizer and its schedule know beside values: by part moments, group settings, loss scale."""

    moments: list[Any]
    groups: list[list[dict[str, Any]]]
    scales: list[dict[str, Any]]
    samples: int


class MegatronAdapters(NamedAdapters[_Progress]):
    """The adapters of one rank, whose optimizer may have float32 copies of their weights."""

    def __init__(
        self,
        names: Sequence[str],
        model: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self._parts, self._scheduler = real_parts(optimizer), scheduler
        params = list(adapter_params(model).values())
        super().__init__(names, lambda: params)
        # In float32 the optimizer has parts of the parameters themselves.
        of_model = {param.untyped_storage().data_ptr() for chunk in model for param in chunk.parameters()}
        masters = [
            param
            for part in self._parts
            for group in part.optimizer.param_groups
            for param in group["params"]
            if param.untyped_storage().data_ptr() not in of_model
        ]
        self._masters = Swapped(self.names, lambda: masters)

    def _fresh(self) -> _Progress:
        groups = [[settings_of(group) for group in part.optimizer.param_groups] for part in self._parts]
        moments: list[Any] = [defaultdict(dict) for _ in self._parts]
        return _Progress(moments, groups, self._loss_scales(), self._scheduler.num_steps)

    def _scalers(self) -> list[Any]:
        """What finds the loss scale of float16, by part; parts may share one."""
        return [part.grad_scaler for part in self._parts if getattr(part, "grad_scaler", None) is not None]

    def _loss_scales(self) -> list[dict[str, Any]]:
        return [scaler.state_dict() for scaler in self._scalers()]

    def _swap_optimizer(self, name: str, coming: _Progress) -> _Progress:
        self._masters.select(name)
        going = _Progress([], [], self._loss_scales(), self._scheduler.num_steps)
        for scaler, scale in zip(self._scalers(), coming.scales, strict=True):
            scaler.load_state_dict(scale)
        for part, moments, groups in zip(self._parts, coming.moments, coming.groups, strict=True):
            optimizer = part.optimizer
            going.moments.append(optimizer.state)
            optimizer.state = moments
            going.groups.append([settings_of(group) for group in optimizer.param_groups])
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                set_group(group, settings)
        self._scheduler.num_steps = coming.samples
        return going

    def snapshot(self) -> dict[str, Any]:
        """Copies to the host what the adapter in place has of its own on this rank, as plain values."""
        return {
            "weights": [_on_host(tensor) for tensor in self._weights.tensors],
            "masters": [_on_host(tensor) for tensor in self._masters.tensors],
            "moments": [
                [[_copied(states.get(param, {})) for param in group["params"]] for group in groups]
                for states, groups in self._groups()
            ],
            "groups": [[settings_of(group) for group in groups] for _, groups in self._groups()],
        }

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Any]) -> None:
        """Gives the adapter in place, optimizer included, what a `snapshot` holds.

        Raises:
            ValueError: it is of other shapes.
        """
        for tensors, key in (self._weights.tensors, "weights"), (self._masters.tensors, "masters"):
            wanted, found = ([list(value.shape) for value in values] for values in (tensors, snapshot[key]))
            if found != wanted:
                raise ValueError(f"state: {key} of shapes {found[:3]}... (wanted: {wanted[:3]}...)")
        for tensors, key in (self._weights.tensors, "weights"), (self._masters.tensors, "masters"):
            for tensor, value in zip(tensors, snapshot[key], strict=True):
                tensor.copy_(value)
        for (kept, groups), moments, settings in zip(
            self._groups(), snapshot["moments"], snapshot["groups"], strict=True
        ):
            for group, states, values in zip(groups, moments, settings, strict=True):
                group.update(values)
                for param, state in zip(group["params"], states, strict=True):
                    kept[param] = _copied(state, param.device)

    def _groups(self) -> Iterator[tuple[dict[Any, Any], list[dict[str, Any]]]]:
        yield from ((part.optimizer.state, part.optimizer.param_groups) for part in self._parts)

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for values in self._masters.others.values():
            yield from values
        for progress in self._progress.values():
            for moments in progress.moments:
                for state in moments.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copied(state: dict[str, Any], device: torch.device | str = "cpu") -> dict[str, Any]:
    """Adam's state of a parameter; a step count that is a tensor stays on the host, as torch has it."""
    return {
        key: value.detach().to("cpu" if value.dim() == 0 else device, copy=True)
        if isinstance(value, torch.Tensor)
        else value
        for key, value in state.items()
    }
