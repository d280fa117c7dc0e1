"""The file with the state of a data source: plain data and tensors, whole or not there."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from slime.rollout.ledger import ledger_metrics
from slime.utils.numpy_data import load_plain
from slime.utils.plain_file import NotPlainError, place, write_plain
from slime.utils.types import Sample

DataState = dict[str, Any]
"""What a data source tells of itself by ``state_dict``."""


def state_now(source: Any) -> DataState | None:
    """The state of a data source that has ``state_dict`` and ``load_state_dict``, as ours have; else None."""
    if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
        return None
    ledger = getattr(source, "ledger", None)
    with nullcontext() if ledger is None else ledger.lock:
        state: DataState = source.state_dict()
    return state


def data_metrics(source: Any) -> dict[str, int]:
    """What a data source of ours says about its prompts, and its books."""
    metrics = getattr(source, "data_metrics", None)
    return (metrics() if metrics else {}) | ledger_metrics(source)


def state_path(directory: str, rollout_id: int) -> Path:
    """Returns where the state after a rollout lies under a ``--save`` directory."""
    return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write a state that ``read_state`` can read.

    Raises:
        ValueError: it holds more than plain data and tensors.
    """
    try:
        write_plain(state, path)
    except NotPlainError as error:
        raise ValueError(
            f"{path}: buffered samples or metadata hold more than plain data and tensors: "
            f"{place(error.keys)} is {error.found}"
        ) from None


def read_state(path: Path) -> dict[str, Any]:
    return load_plain(path)


def to_plain(group: Any) -> Any:
    """A group as plain data; one with samples that were split has lists of them."""
    return [to_plain(item) for item in group] if isinstance(group, list) else group.to_dict()


def from_plain(plain: Any) -> Any:
    """Inverse of ``to_plain``."""
    return [from_plain(item) for item in plain] if isinstance(plain, list) else Sample.from_dict(plain)
