"""The device and number format of an optimizer's moments, and steps of what lies on the host."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from slime.utils.accelerator import CopyLane, host_like

Apply = Callable[[list[torch.Tensor], list[torch.Tensor], Sequence[Mapping[str, torch.Tensor]]], None]


@dataclass(frozen=True)
class MomentStorage:
    """How moments are kept.

    Attributes:
        formats: number format of a moment where it is not float32, by its name.
        host_fraction: part of the elements on the device whose moments lie, and whose steps are computed, on
            the host; without a GPU there is nowhere to move them to.
        overlap: whether parameters and gradients are copied while others are being computed.
        pin_params, pin_grads: whether the host's copies of them are in pinned memory.
        is_away: whether a tensor does not lie on the host.
    """

    formats: Mapping[str, torch.dtype] = field(default_factory=dict)
    host_fraction: float = 0.0
    overlap: bool = False
    pin_params: bool = True
    pin_grads: bool = True
    is_away: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda

    def offloaded(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters whose moments go to the host: the first ones, up to the fraction."""
        away = [param for param in params if self.is_away(param)]
        left = self.host_fraction * sum(param.numel() for param in away)
        chosen = []
        for param in away:
            if left > 0:
                chosen.append(param)
            left -= param.numel()
        return chosen

    def zeros(self, param: torch.Tensor, name: str, on_host: bool) -> torch.Tensor:
        """A moment of zero for a parameter."""
        dtype = self.formats.get(name, torch.float32)
        if not on_host:
            return torch.zeros_like(param.detach(), dtype=dtype)
        return host_like(param.detach().to("meta", dtype), self.pin_params).zero_()


class HostSteps:
    """Steps on the host for parameters on the device, each with two float32 buffers there."""

    def __init__(self, storage: MomentStorage) -> None:
        self._storage = storage
        self._buffers: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = {}
        self._to_host = CopyLane(beside=storage.overlap)
        self._to_device = CopyLane(beside=storage.overlap)

    def step(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        moments: Sequence[Mapping[str, torch.Tensor]],
        apply: Apply,
    ) -> None:
        """One step of ``apply`` for each parameter; ``moments`` lie on the host."""
        arrived = []
        for param, gradient in zip(params, grads, strict=True):
            weight, grad = self._buffers_of(param)
            self._to_host.copy(weight, param.detach())
            arrived.append(self._to_host.copy(grad, gradient))
        for param, kept, wait in zip(params, moments, arrived, strict=True):
            wait()
            weight, grad = self._buffers_of(param)
            apply([weight], [grad], [kept])
            self._to_device.copy(param.detach(), weight)
        self._to_device.join()

    def _buffers_of(self, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if param not in self._buffers:
            blank = param.detach().to("meta", torch.float32)
            pins = (self._storage.pin_params, self._storage.pin_grads)
            weight, grad = (host_like(blank, pin) for pin in pins)
            self._buffers[param] = weight, grad
        return self._buffers[param]
