"""Checkpoints of a training run in torch's distributed format (DCP).

    <save>/iter_0000007/model/        weights in float32, of any number of ranks; with adapters these alone
                        optimizer/    moments and step counts
                        ref/          weights of a version that is saved along
                        adapter_NAME/ model/ and optimizer/ of each of several adapters but the first
                        rng_00000.pt  random generators of a rank
                        metadata.json schedule and plain values; there when all else is

Only tensors are in the distributed parts; nothing that is read can run code.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from slime.adapters.record import RECORD, lora_record, require_all_weights, require_same_adapters
from slime.adapters.targets import is_of_adapter
from slime.backends.fsdp_utils.named_checkpoint import PLACES, of_others, place_of, plain_values
from slime.backends.fsdp_utils.named_tensors import named_tensors
from slime.backends.fsdp_utils.optimizer import ensure_states
from slime.backends.fsdp_utils.step import TrainState
from slime.backends.fsdp_utils.value_head import without_foreign_head
from slime.config.backend import BackendConfig
from slime.config.checkpoints import CheckpointConfig
from slime.config.trainers import FSDP
from slime.training.checkpoint_dir import (
    find_checkpoint,
    fresh_directory,
    iteration_dir,
    on_first_rank,
    publish,
    record,
)
from slime.training.checkpoint_errors import explained, on_every_rank, other_optimizer
from slime.training.named_adapters import each_adapter
from slime.training.save_attempts import SaveAttempts
from slime.utils.accelerator import has_gpu

Tensors = dict[str, torch.Tensor]
Swap = Callable[[], AbstractContextManager[None]]
"""Puts another version in the place of the trained weights; leaving it undoes that."""


def model_tensors(state: TrainState) -> Tensors:
    """The tensors of the model without adapters."""
    return {name: tensor.detach() for name, tensor in named_tensors(state.model)}


def trained_tensors(state: TrainState) -> Tensors:
    """What a checkpoint holds of the model: the adapters alone where nothing else trains."""
    if not state.adapts:
        return model_tensors(state)
    params = state.model.named_parameters()
    return {name: param.detach() for name, param in params if is_of_adapter(name)}


def optimizer_tensors(state: TrainState) -> Tensors:
    """``NAME.exp_avg`` and so on of every parameter that trains."""
    ensure_states(state.optimizer)
    return {
        f"{name}.{key}": value
        for name, param in state.model.named_parameters()
        if param.requires_grad
        for key, value in state.optimizer.state[param].items()
    }


class CheckpointWriter:
    """Saves to a directory; with ``--async-save`` a thread writes copies while training goes on.

    Args:
        flags: where to, and what; those of the configuration, or of snapshots.
    """

    def __init__(self, config: BackendConfig, flags: CheckpointConfig) -> None:
        self._config, self._later = flags, flags.async_save
        self._record = lora_record(config.lora)
        self._root = flags.save or ""
        self.attempts = SaveAttempts(self._root)
        self._temporary = Path(self._root)  # of the save that is being written
        self._optimizer = config.optimizer.optimizer
        self._thread = ThreadPoolExecutor(1, "checkpoint") if self._later else None
        # A group of its own: the thread's messages must not mix with the trainer's.
        timeout = timedelta(minutes=config.cluster.distributed_timeout_minutes)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._writing: tuple[Future[None], Callable[[], None]] | None = None

    def save(
        self, iteration: int, state: TrainState, common: Mapping[str, Any], versions: Mapping[str, Swap]
    ) -> None:
        """Collective. Writes model, optimizer, schedule, random state and ``common``, plain values; how it
        ended is among the ``attempts``.
        """
        self.finish()
        final = iteration_dir(self._root, iteration)
        temporary = self._temporary = final.with_suffix(".tmp")
        with self.attempts.attempt(temporary):
            # Those too: where torch finds no room for one, it is in planning, and no save that failed.
            on_first_rank(lambda: fresh_directory(temporary, self._part_names(state, versions)))
            parts = self._parts(state, versions)
            content = self._plain(iteration, state, common)
            on_every_rank(lambda: self._write_small_files(temporary, content))
            make_latest = partial(publish, temporary, final, iteration, self._config.keep_checkpoints)
            if self._thread is None:
                self._write(temporary, parts)
                self._make_latest(make_latest)
            else:
                self._writing = self._thread.submit(self._write, temporary, parts), make_latest

    def _write_small_files(self, directory: Path, content: dict[str, Any]) -> None:
        if not self._config.no_save_rng:
            save_random_state(directory, dist.get_rank())
        if dist.get_rank() == 0:
            (directory / "metadata.json").write_text(json.dumps(content, indent=2) + "\n")

    def _make_latest(self, action: Callable[[], None]) -> None:
        on_first_rank(action)
        self.attempts.complete()

    def _part_names(self, state: TrainState, versions: Iterable[str]) -> list[str]:
        own = ["model", *([] if self._config.no_save_optim else ["optimizer"])]
        others = state.named.names[1:] if state.named else ()
        return [*versions, *own, *(f"{place_of(name)}/{part}" for name in others for part in own)]

    def _parts(self, state: TrainState, versions: Mapping[str, Swap]) -> dict[str, Tensors]:
        parts: dict[str, Tensors] = {}
        for tag, swap in versions.items():
            with swap():
                parts[tag] = _copies(trained_tensors(state))
        for name, own in of_others(state, lambda: self._own_parts(state, _copies)).items():
            parts |= {f"{place_of(name)}/{part}": tensors for part, tensors in own.items()}
        return parts | self._own_parts(state, _copies if self._later else dict)

    def _own_parts(self, state: TrainState, keep: Callable[[Tensors], Tensors]) -> dict[str, Tensors]:
        parts = {"model": keep(trained_tensors(state))}
        if not self._config.no_save_optim:
            parts["optimizer"] = keep(optimizer_tensors(state))
        return parts

    def _plain(self, iteration: int, state: TrainState, common: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "sharded_backend": FSDP.checkpoint_format,
            "sharded_backend_version": 1,
            "iteration": iteration,
            "world_size": dist.get_world_size(),
            "optimizer": self._optimizer,
            "common": {**common, **({RECORD: self._record} if state.adapts else {})},
            **plain_values(state),
            **({PLACES: of_others(state, lambda: plain_values(state))} if state.named else {}),
        }

    def _write(self, directory: Path, parts: Mapping[str, Tensors]) -> None:
        for name, tensors in parts.items():
            dcp.save(dict(tensors), checkpoint_id=directory / name, process_group=self._group)
        record(directory, self._group)

    def poll(self) -> None:
        """Makes a background save the latest if it is complete; does not wait."""
        # The first rank's part ends last: it writes what says where the others' are.
        if dist.get_rank() == 0 and self._writing is not None and self._writing[0].done():
            future, make_latest = self._writing
            if future.exception() is None:
                with suppress(OSError):  # `finish` tries again, and tells all ranks
                    make_latest()
                    self._writing = future, lambda: None

    def finish(self) -> None:
        """Collective. Waits for a save that is still being written, and makes it the latest."""
        if self._writing is None:
            return
        future, make_latest = self._writing
        self._writing = None
        with self.attempts.attempt(self._temporary):
            future.result()
            self._make_latest(make_latest)


def _copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Copies tensors to the host, into memory of their own."""
    return {
        name: tensor.to("cpu") if tensor.device.type != "cpu" else tensor.clone()
        for name, tensor in tensors.items()
    }


def load_checkpoint(config: BackendConfig, state: TrainState, root: str | Path) -> tuple[int, dict[str, Any]]:
    """Collective. Loads weights and, as far as flags allow, optimizer, schedule and random state.

    Random state is left alone where other ranks saved it.

    Returns:
        The iteration, and the common values that were saved with it.
    """
    flags, optimizer = config.checkpoints, config.optimizer.optimizer
    iteration, path = find_checkpoint(root, flags.ckpt_step)
    saved = read_metadata(path)
    own = lora_record(config.lora) if state.adapts else None
    require_same_adapters(own, saved["common"].get(RECORD), path)
    with_optimizer = not (flags.finetune or flags.no_load_optim)
    if with_optimizer and (made_by := saved.get("optimizer", optimizer)) != optimizer:
        raise other_optimizer(path, f"--optimizer {made_by}", f"--optimizer {optimizer}")
    places = {name: (path / place_of(name), own) for name, own in saved.get(PLACES, {}).items()}
    for name in each_adapter(state):
        place, values = places.get(name or "", (path, saved))
        load_trained(state, place / "model")
        if with_optimizer:
            _load_optimizer(optimizer, state, place, values, root)
    if state.named:
        state.named.put_in_place(state.named.names[0])
    same_ranks = saved["world_size"] == dist.get_world_size()
    if same_ranks and not (flags.finetune or flags.no_load_rng):
        load_random_state(path, dist.get_rank())
    return iteration, saved["common"]


def _load_optimizer(
    optimizer: str, state: TrainState, place: Path, saved: Mapping[str, Any], root: str | Path
) -> None:
    """Moments, schedule and loss scale of what the directory ``place`` holds.

    Args:
        saved: its plain values.
    """
    if not (place / "optimizer").is_dir():
        raise ValueError(
            f"checkpoint {place} has no optimizer state: wanted --no-load-optim or another --load"
        )
    _read(_saved_moments(optimizer, state, place / "optimizer"), place / "optimizer")
    _load_schedule(state, saved["scheduler"], root)
    if state.loss_scale is not None and "loss_scale" in saved:
        state.loss_scale.load_state_dict(saved["loss_scale"])


def _saved_moments(optimizer: str, state: TrainState, path: Path) -> Tensors:
    """What is to be read: of SGD without momentum nothing was saved, and momentum starts at zero."""
    tensors = optimizer_tensors(state)
    if optimizer != "sgd":
        return tensors
    with _readable(path):
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return tensors if saved else {}


def load_trained(state: TrainState, path: Path) -> None:
    """Collective. Overwrites what trains with a part of a checkpoint of the same adapters, or of none."""
    if state.adapts:
        _read(trained_tensors(state), path)
    else:
        _load_model(state, path)


def load_weights(state: TrainState, path: Path) -> None:
    """Collective. Overwrites all weights but adapters with those of the checkpoint directory ``path``.

    Raises:
        ValueError: another trainer wrote it, or it holds adapters alone.
    """
    require_all_weights(read_metadata(path)["common"], path)
    _load_model(state, path / "model")


def _load_model(state: TrainState, path: Path) -> None:
    """A value head stays as it is where the checkpoint has none: that of an actor."""
    with _readable(path):
        tensors = without_foreign_head(model_tensors(state), path)
    _read(tensors, path)


def read_metadata(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint.

    Raises:
        ValueError: another trainer wrote it.
    """
    content: dict[str, Any] = json.loads((path / "metadata.json").read_text())
    if (found := content.get("sharded_backend")) != FSDP.checkpoint_format:
        wanted = f"wanted {FSDP.checkpoint_format!r} of --train-backend fsdp"
        raise ValueError(f"checkpoint {path}: its format is {found!r}, {wanted}")
    return content


def _read(tensors: Tensors, path: Path) -> None:
    with _readable(path):
        dcp.load(dict(tensors), checkpoint_id=path)


def _readable(path: Path) -> AbstractContextManager[None]:
    return explained(path, "read", "a complete copy, or another iteration with --ckpt-step")


def _load_schedule(state: TrainState, saved: Mapping[str, Any], root: str | Path) -> None:
    try:
        state.scheduler.load_state_dict(saved)
    except ValueError as error:
        raise ValueError(f"--load {root}: {error}") from error


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
