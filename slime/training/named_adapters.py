"""Several adapters on one base: the model and its optimizer are those of one at a time.

What an adapter has of its own is swapped for what is in place: its weights, and for its optimizer steps what
the optimizer of a trainer knows of them. So a step of an adapter is that of a run which has no other one:
nothing is shared but the base, and an adapter without samples stays as it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from slime.utils.accelerator import synchronize

P = TypeVar("P")


class Swapped:
    """Values of some tensors by adapter, one of which is in the tensors themselves.

    Args:
        read: gives the tensors, whose memory may become another one between two calls.

    Attributes:
        live: that one.
        others: the values of all others.
    """

    def __init__(self, names: Sequence[str], read: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._read, self.live = read, names[0]
        self.others = {name: [tensor.detach().clone() for tensor in read()] for name in names[1:]}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self._read())

    @torch.no_grad()
    def select(self, name: str) -> None:
        if name == self.live:
            return
        synchronize()  # a pass may have yet to fetch what is on the host
        values = self.others.pop(name)
        for tensor, value in zip(self.tensors, values, strict=True):
            before = tensor.clone()
            tensor.copy_(value)
            value.copy_(before)
        self.others[self.live] = values
        self.live = name


class NamedAdapters(ABC, Generic[P]):
    """The adapters of one rank. All begin as the one that the model has.

    A trainer adds what its optimizer knows of one, ``P``.

    Args:
        read: gives this rank's tensors of the one in place; see `Swapped`.

    Attributes:
        names: of all of them.
    """

    def __init__(self, names: Sequence[str], read: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.names = tuple(names)
        self._weights = Swapped(self.names, read)
        self._optimized = self.names[0]
        self._progress = {name: self._fresh() for name in self.names[1:]}

    @abstractmethod
    def _fresh(self) -> P:
        """Returns that of an adapter that has taken no step, of an optimizer that has taken none."""

    @abstractmethod
    def _swap_optimizer(self, name: str, coming: P) -> P:
        """Gives optimizer and schedule what they know of ``name``; returns what they knew before."""

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
        before, name = self._optimized, self.live
        if before != name:
            self._progress[before] = self._swap_optimizer(name, self._progress.pop(name))
            self._optimized = name

    def put_in_place(self, name: str) -> None:
        """Both: what an optimizer step, a save or a load is about."""
        self.select(name)
        self.select_optimizer()

    def others(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights of those that the model has not, by names for messages."""
        for name, values in self._weights.others.items():
            yield from ((f"adapter {name}, tensor {number}", value) for number, value in enumerate(values))

    @abstractmethod
    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Yields what the optimizers of those have that it is not in place for."""


class Trains(Protocol):
    """What `each_adapter` needs to know of what a trainer rank trains."""

    @property
    def named(self) -> NamedAdapters[Any] | None: ...


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


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a group of an optimizer says of the steps of its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def set_group(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Gives a group these settings, and no others."""
    params = group["params"]
    group.clear()
    group.update({**settings, "params": params})
