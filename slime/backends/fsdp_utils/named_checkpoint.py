"""Several adapters in a checkpoint: the first is the checkpoint's own, the others lie beneath it."""

from collections.abc import Callable
from typing import Any

from slime.backends.fsdp_utils.step import TrainState

PLACES = "adapters"
"""The name of the plain values of the others in metadata.json."""


def place_of(name: str) -> str:
    """The directory of an adapter, beneath the checkpoint's."""
    return f"adapter_{name}"


def plain_values(state: TrainState) -> dict[str, Any]:
    """What schedule and loss scale know of the adapter that is in place."""
    scale = {} if state.loss_scale is None else {"loss_scale": state.loss_scale.state_dict()}
    return {"scheduler": state.scheduler.state_dict(), **scale}


def of_others(state: TrainState, take: Callable[[], Any]) -> dict[str, Any]:
    """What ``take`` gives with each adapter but the first in place, which is in place again then."""
    if state.named is None:
        return {}
    first, *others = state.named.names
    found = {}
    for name in others:
        state.named.put_in_place(name)
        found[name] = take()
    state.named.put_in_place(first)
    return found
