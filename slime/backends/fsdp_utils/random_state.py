"""The random generators of a rank, in a form that can be read back without running anything."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.utils.accelerator import has_gpu


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rng_{rank:05d}.pt"


def save_random_state(directory: Path, rank: int) -> None:
    kind, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if has_gpu() else None,
    }
    torch.save(state, _file(directory, rank))


def load_random_state(directory: Path, rank: int) -> None:
    """What `save_random_state` has written there; nothing if it has not.

    Raises:
        ValueError: the file holds something else.
    """
    file = _file(directory, rank)
    if not file.is_file():
        return
    try:
        state = torch.load(file, weights_only=True)
        kind, keys, *rest = state["numpy"]
    except Exception as error:  # a malformed file can raise anything
        raise ValueError(f"{file}: not the random state of a rank ({type(error).__name__})") from error
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and has_gpu():
        torch.cuda.set_rng_state(state["device"])
