"""Several adapters on one base: the model and its optimizer are those of one at a time.

What an adapter has of its own is swapped for what is in place: its weights, and for its optimizer steps the
float32 copies of these, moments, step counts and how far its schedule is. So a step of an adapter is that of
a run which has no other one: nothing is shared but the base, and an adapter without samples stays as it is.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.backends.megatron_utils.lora_checkpoint import adapter_params
from slime.backends.megatron_utils.optimizer import real_parts


class _Tensors:
    """Values of some tensors by adapter, one of which is in the tensors themselves."""

    def __init__(self, names: Sequence[str], tensors: Iterable[torch.Tensor]) -> None:
        self.tensors, self.live = list(tensors), names[0]
        self.others = {name: [tensor.detach().clone() for tensor in self.tensors] for name in names[1:]}

    @torch.no_grad()
    def select(self, name: str) -> None:
        if name == self.live:
            return
        values = self.others.pop(name)
        for tensor, value in zip(self.tensors, values, strict=True):
            before = tensor.clone()
            tensor.copy_(value)
            value.copy_(before)
        self.others[self.live] = values
        self.live = name


@dataclass
class _Progress:
    """What an optimizer and its schedule know beside values: by part its moments and group settings."""

    moments: list[Any]
    groups: list[list[dict[str, Any]]]
    samples: int


class NamedAdapters:
    """The adapters of one rank. All begin as the one that the model has.

    Attributes:
        names: of all of them.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: Sequence[torch.nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self.names = tuple(names)
        self._parts, self._scheduler = real_parts(optimizer), scheduler
        params = list(adapter_params(model).values())
        self._weights = _Tensors(self.names, params)
        # In float32 the optimizer has parts of the parameters themselves.
        of_model = {param.untyped_storage().data_ptr() for chunk in model for param in chunk.parameters()}
        masters = [
            param
            for part in self._parts
            for group in part.optimizer.param_groups
            for param in group["params"]
            if param.untyped_storage().data_ptr() not in of_model
        ]
        self._masters = _Tensors(self.names, masters)
        self._progress = {name: self._fresh() for name in self.names[1:]}

    @property
    def live(self) -> str:
        """The one whose weights the model has."""
        return self._weights.live

    def select(self, name: str) -> None:
        """Gives the model the weights of an adapter; the optimizer follows with `select_optimizer`.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self.names:
            raise ValueError(f"adapter {name!r} (wanted: one of --lora-adapters, {', '.join(self.names)})")
        self._weights.select(name)

    def select_optimizer(self) -> None:
        """Makes optimizer and schedule those of the adapter whose weights the model has."""
        before, name = self._masters.live, self._weights.live
        if before == name:
            return
        self._masters.select(name)
        coming = self._progress.pop(name)
        self._progress[before] = self._swapped(coming)

    def put_in_place(self, name: str) -> None:
        """Both: what an optimizer step, a save or a load is about."""
        self.select(name)
        self.select_optimizer()

    def _swapped(self, coming: _Progress) -> _Progress:
        going = _Progress([], [], self._scheduler.num_steps)
        for part, moments, groups in zip(self._parts, coming.moments, coming.groups, strict=True):
            optimizer = part.optimizer
            going.moments.append(optimizer.state)
            optimizer.state = moments
            going.groups.append([_settings(group) for group in optimizer.param_groups])
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                params = group["params"]
                group.clear()
                group.update({**settings, "params": params})
        self._scheduler.num_steps = coming.samples
        return going

    def _fresh(self) -> _Progress:
        """Returns that of an adapter that has taken no step, of an optimizer that has taken none."""
        groups = [[_settings(group) for group in part.optimizer.param_groups] for part in self._parts]
        return _Progress([defaultdict(dict) for _ in self._parts], groups, self._scheduler.num_steps)

    def snapshot(self) -> dict[str, Any]:
        """Copies to the host what the adapter in place has of its own on this rank, as plain values."""
        return {
            "weights": [_on_host(tensor) for tensor in self._weights.tensors],
            "masters": [_on_host(tensor) for tensor in self._masters.tensors],
            "moments": [
                [[_copied(states.get(param, {})) for param in group["params"]] for group in groups]
                for states, groups in self._groups()
            ],
            "groups": [[_settings(group) for group in groups] for _, groups in self._groups()],
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

    def others(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights of those that the model has not, by names for messages."""
        for name, values in self._weights.others.items():
            yield from ((f"adapter {name}, tensor {number}", value) for number, value in enumerate(values))

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Yields what the optimizers of those have that it is not in place for."""
        for values in self._masters.others.values():
            yield from values
        for progress in self._progress.values():
            for moments in progress.moments:
                for state in moments.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class Trains(Protocol):
    """What `each_adapter` needs to know of a `slime.backends.megatron_utils.step.TrainState`."""

    named: NamedAdapters | None


def each_adapter(state: Trains) -> Iterator[str | None]:
    """Puts one adapter after the other in place, with its optimizer, and yields its name.

    Once, and None, where adapters have no names.
    """
    if state.named is None:
        yield None
        return
    for name in state.named.names:
        state.named.put_in_place(name)
        yield name


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


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
