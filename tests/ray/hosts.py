"""Hosts with snapshots, without Ray."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.ray.snapshot_holder import SnapshotHolder
from slime.ray.snapshot_holders import HolderFailed


class Host:
    """A holder, called as an actor is: a reference is a function that returns, or raises, what it did."""

    def __init__(self) -> None:
        self.holder, self.lost, self.copy_fails = SnapshotHolder(), False, False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self.lost:
                raise HolderFailed("the host is lost")
            if name == "copy_parts" and self.copy_fails:
                raise HolderFailed("full")
            return getattr(self.holder, name)(*arguments)

        return SimpleNamespace(remote=lambda *arguments: _outcome(call, *arguments))

    @property
    def place(self) -> Path:
        return self.holder._directory

    def ranks(self, iteration: int, name: str = "actor") -> list[int]:
        return self.holder.parts([name], True)[name].get(iteration, [])


def _outcome(call: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    outcome: Future[Any] = Future()
    try:
        outcome.set_result(call(*arguments))
    except Exception as error:
        outcome.set_exception(error)
    return outcome.result
