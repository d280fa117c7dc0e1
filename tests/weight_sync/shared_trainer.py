"""Trainer ranks that share the work of changes, in two pipeline stages, and what may go wrong on one."""

import copy
import os
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from slime.config.run import run_config
from slime.training.weights import TensorInfo
from slime.utils.types import EngineEndpoint
from slime.weight_sync.transports import delta
from slime.weight_sync.update import WeightUpdate
from slime.weight_sync.versions.folder import Folder, FolderPart
from slime.weight_sync.versions.share import HeldShare

FORMS = {
    **{f"wide{at}": (torch.bfloat16, (16, 4), at % 2) for at in range(6)},
    **{f"narrow{at}": (torch.float32, (5,), at % 2) for at in range(6)},
    "layers.0.q_a_proj.weight": (torch.float32, (7,), 1),
    "empty": (torch.float32, (0, 2), 0),
    "layers.0.kv_a_proj_with_mqa.weight": (torch.float32, (9,), 1),
}
"""By name format, shape and stage."""


class StagedSource:
    """Random tensors of two stages, of which some bytes change with each update; the same on every rank."""

    rounding = 0.0

    def __init__(self, seed: int = 0) -> None:
        self.ranks = frozenset(range(dist.get_world_size() if dist.is_initialized() else 1))
        self.stage = 2 * dist.get_rank() // len(self.ranks) if len(self.ranks) > 1 else 0
        self.rng = np.random.default_rng(seed)
        self.weights = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape, _) in FORMS.items()}
        self.asked: list[str] = []
        """The names of what was gathered over stages."""

    def train(self) -> None:
        """In place, as an optimizer does."""
        for tensor in self.weights.values():
            data = tensor.view(-1).view(torch.uint8)
            for at in self.rng.integers(0, max(1, data.numel()), 2 * bool(data.numel())):
                data[at] ^= int(self.rng.integers(1, 256))

    def manifest(self):
        return [TensorInfo(name, shape, dtype, owner=stage) for name, (dtype, shape, stage) in FORMS.items()]

    def buckets(self, max_bytes):
        for name, tensor in self.weights.items():
            self.asked.append(name)
            yield [(name, tensor)]

    def own_buckets(self, max_bytes):
        own = [(name, tensor) for name, tensor in self.weights.items() if FORMS[name][2] == self.stage]
        for start in range(0, len(own), 3):
            yield own[start : start + 3]


def weights_after(steps: int) -> dict[str, torch.Tensor]:
    """What a trainer has after each of some steps."""
    source, found = StagedSource(), []
    for _ in range(steps):
        source.train()
        found.append(copy.deepcopy(source.weights))
    return found


def full(*_args, **_options):
    raise OSError(28, os.strerror(28), "the disk of this rank")


def too_large(*_args, **_options):
    raise MemoryError("of this rank")


FAULTS = {
    "a full disk": lambda: patch.object(FolderPart, "file", full),
    "a file that is read otherwise": lambda: patch.object(FolderPart, "check", _other),
    "no memory for changes": lambda: patch.object(HeldShare, "changes_of", too_large),
    "no memory for the base": lambda: patch.object(HeldShare, "_with_changes", too_large),
    "no directory": lambda: patch.object(Folder, "has_taken", lambda self, writer: False),
    "a directory that cannot be read": lambda: patch.object(Folder, "has_taken", full),
    "few links": lambda: patch.object(delta, "MAX_LINKS", 2),
}


def _other(self, files, written, algorithm):
    raise ValueError("wide1: xxh3-128 00 is read (wanted: 11, as was written)")


@contextmanager
def fault(name: str | None, is_here: bool):
    if name is None or not is_here:
        yield
    else:
        with FAULTS[name]():
            yield


def run(rank, args, url, plan):
    """Makes updates, and connects again after each that fails.

    Args:
        plan: for each update the ranks on which something goes wrong, and what.

    Returns:
        For each update what became of it, what this rank holds then, and the names that crossed stages.
    """
    dist.init_process_group("gloo")
    source = StagedSource()
    update = WeightUpdate(run_config(args), source)
    endpoints = [] if url is None else [EngineEndpoint(url, None, 1, None)]
    (transport,) = update._transports
    told, connected = [], False
    for number, (ranks, what) in enumerate(plan, start=1):
        source.train()
        source.asked = []
        error, report = None, None
        with fault(what, rank in ranks):
            try:
                if not connected:
                    update.connect(endpoints)
                    connected = True
                report = update.run(number)
            except Exception as raised:
                error, connected = f"{type(raised).__name__}: {raised}", False
        held = {name: kept.data.nbytes for name, kept in transport._held._kept.items()}
        link = transport._held.link
        told.append({"error": error, "held": held, "link": link and [*link], "asked": source.asked})
        told[-1] |= {"sources": sorted(transport.source_ranks()), "sent": report.sent if report else None}
        told[-1] |= {"density": report.density if report else None}
    update.disconnect()
    return told


def files_of(directory: Path) -> set[str]:
    return {file.name for file in directory.glob("*.safetensors")}
