"""Named copies of a model's tensors in host memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from slime.utils.accelerator import host_like, synchronize


class TensorBackuper:
    """Keeps several versions ("tags") of one set of tensors on the CPU and puts them back in place.

    Args:
        source_getter: yields (name, tensor) of the live tensors, always the same names.
    """

    def __init__(self, source_getter: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._source = source_getter
        self._copies: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def backup_tags(self) -> list[str]:
        return list(self._copies)

    def get(self, tag: str) -> dict[str, torch.Tensor]:
        """The copies under ``tag``. Raises KeyError if there are none."""
        return self._copies[tag]

    @torch.no_grad()
    def backup(self, tag: str) -> None:
        """Copies the live tensors into ``tag``, reusing its memory."""
        copies = self._copies.setdefault(tag, {})
        for name, tensor in self._source():
            if name not in copies:
                copies[name] = host_like(tensor)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        synchronize()

    @torch.no_grad()
    def copy(self, *, src_tag: str, dst_tag: str) -> None:
        """Makes ``dst_tag`` equal to ``src_tag``."""
        copies = self._copies.setdefault(dst_tag, {})
        for name, tensor in self._copies[src_tag].items():
            if name in copies:
                copies[name].copy_(tensor)
            else:
                copies[name] = tensor.clone()

    @torch.no_grad()
    def restore(self, tag: str) -> None:
        """Overwrites the live tensors with those of ``tag``.

        Live ones on the host are read by copies to the GPU that have been queued and not made yet, where
        parameters are offloaded: a forward pass that nobody has waited for computes with what is there then.
        """
        copies = self._copies[tag]
        synchronize()
        for name, tensor in self._source():
            tensor.copy_(copies[name], non_blocking=True)
        synchronize()

    @contextmanager
    def swapped(self, tag: str, live_tag: str) -> Iterator[None]:
        """Swaps the tensors of ``tag`` for the live ones, which are kept under ``live_tag`` meanwhile."""
        self.backup(live_tag)
        self.restore(tag)
        try:
            yield
        finally:
            self.restore(live_tag)
