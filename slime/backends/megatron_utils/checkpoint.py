"""Checkpoints of a training run through megatron-core's dist_checkpointing.

A checkpoint fits any tensor-, pipeline- and data-parallel layout of the same model.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from slime.adapters.record import RECORD, lora_record, require_all_weights, require_same_adapters
from slime.backends.megatron_utils import checkpoint_processes
from slime.backends.megatron_utils.background_save import BackgroundSaves
from slime.backends.megatron_utils.first_rank_writes import FirstRankWrites
from slime.backends.megatron_utils.foreign_checkpoint import (
    NothingInCommon,
    layer_naming,
    numbers_layers_of_optimizer,
    read_common,
    split_objects,
)
from slime.backends.megatron_utils.lora_checkpoint import (
    load_adapter_state,
)
from slime.backends.megatron_utils.mtp_checkpoint import require_mtp, without_absent_mtp
from slime.backends.megatron_utils.named_checkpoint import load_others, other_places, save_others
from slime.backends.megatron_utils.optimizer import update_rule
from slime.backends.megatron_utils.random_state import set_random_state
from slime.backends.megatron_utils.resume import require_same_rule
from slime.backends.megatron_utils.sharded_state import (
    METADATA,
    layout,
    load_model,
    model_state,
    read_state,
    sharded_state,
    take,
    trained_state,
)
from slime.backends.megatron_utils.step import TrainState
from slime.backends.megatron_utils.value_head import without_foreign_head
from slime.config.backend import BackendConfig
from slime.config.checkpoints import CheckpointConfig
from slime.config.trainer import TrainerConfig
from slime.training.checkpoint_dir import (
    MARKER,
    find_checkpoint,
    fresh_directory,
    iteration_dir,
    on_first_rank,
    publish,
    record,
)
from slime.training.save_attempts import SaveAttempts
from slime.utils.checkpoint_record import Sums, take_sums


def is_megatron_checkpoint(path: str | Path | None) -> bool:
    """Whether ``path`` has at least one complete checkpoint."""
    return path is not None and (Path(path) / MARKER).is_file()


ModelContext = Callable[[], AbstractContextManager[dict[str, Any]]]
"""Puts another model in the place of the trained one and gives its state; leaving it undoes that."""


class CheckpointWriter:
    """Saves to a directory; with ``--async-save`` a forked process writes while training goes on.

    Args:
        flags: where to, and what; those of the configuration, or of snapshots.
    """

    def __init__(self, config: BackendConfig, flags: CheckpointConfig) -> None:
        self._config, self._flags = config, flags
        self._root = flags.save or ""
        self.attempts = SaveAttempts(self._root)
        self._first_rank = FirstRankWrites()
        self._temporary = Path(self._root)  # of the save that is being written
        self._sums: Sums = {}  # of its files, as far as they are taken
        self._queue = BackgroundSaves(self._take_sums) if self._flags.async_save else None
        checkpoint_processes.install()

    def save(
        self,
        iteration: int,
        state: TrainState,
        common: dict[str, Any],
        extra: Mapping[str, ModelContext] | None = None,
    ) -> None:
        """Collective. Writes model, optimizer, schedule, random state and ``common``; how it ended is among
        the ``attempts``.

        Args:
            common: plain values, the same on every rank.
            extra: further models, each in a subdirectory of its own; the context gives its state, and
                brings the trained model back when it is left.
        """
        self.finish()
        self._temporary = iteration_dir(self._root, iteration).with_suffix(".tmp")
        self._sums = {}
        self._first_rank.forget()
        with self.attempts.attempt(self._temporary), self._first_rank.kept():
            self._save(iteration, state, common, extra or {})

    def _save(
        self,
        iteration: int,
        state: TrainState,
        common: dict[str, Any],
        extra: Mapping[str, ModelContext],
    ) -> None:
        final, temporary = iteration_dir(self._root, iteration), self._temporary
        places = [*extra, *other_places(state)]
        on_first_rank(lambda: fresh_directory(temporary, subdirectories=places))
        for name, make in extra.items():
            with make() as weights:
                dist_checkpointing.save(weights, str(temporary / name), content_metadata=METADATA)
        save_others(self._flags, state, temporary)
        content = sharded_state(self._flags, state, numbered=_freezes(self._config.trainer))
        has = {"has_optimizer": "optimizer" in content, "has_rng": "rng" in content}
        rule = type(update_rule(self._config)).__name__
        content["common"] = {**common, **has, "layout": layout(), "update_rule": rule}
        if state.adapts:
            content["common"][RECORD] = lora_record(self._config.lora)
        request = dist_checkpointing.save(
            content,
            str(temporary),
            self._strategy(),
            async_sharded_save=self._queue is not None,
            content_metadata=METADATA,
        )

        def make_latest() -> None:
            self._first_rank.require()
            record(temporary, known=self._sums)
            on_first_rank(lambda: publish(temporary, final, iteration, self._flags.keep_checkpoints))
            self.attempts.complete()

        if self._queue is None or request is None:
            make_latest()
        else:
            request.add_finalize_fn(make_latest)
            self._queue.schedule_async_request(request)

    def _take_sums(self) -> None:
        """Reads what this rank has written in the background, while training goes on."""
        with suppress(OSError):  # `record` reads it again, and tells all ranks
            self._sums = take_sums(self._temporary, dist.get_rank())

    def _strategy(self) -> SaveShardedStrategy:
        """Who writes what: all data-parallel replicas a part, or the first one everything."""
        strategy = get_default_save_sharded_strategy()
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        if self._flags.no_ckpt_fully_parallel_save or group.size() == 1:
            return strategy
        return FullyParallelSaveStrategyWrapper(strategy, group)

    def poll(self) -> None:
        """Collective. Makes a background save the latest if it is complete; does not wait."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Collective. Waits for a save that is still being written, and makes it the latest."""
        self._finalize(blocking=True)

    def _finalize(self, blocking: bool) -> None:
        if self._queue is not None:
            with self.attempts.attempt(self._temporary), self._first_rank.kept():
                self._queue.maybe_finalize_async_calls(blocking=blocking)


def load_checkpoint(config: BackendConfig, state: TrainState, root: str | Path) -> tuple[int, dict[str, Any]]:
    """Collective. Loads weights and, as far as flags allow, optimizer, schedule and random state.

    Random state is left alone where the parallel layout differs from the one that saved it. Of a checkpoint
    that this trainer did not write only the weights can be loaded.

    Returns:
        The iteration, and the common values that were saved with it.

    Raises:
        ValueError: flags want more of the checkpoint than it has.
    """
    flags = config.checkpoints
    iteration, path = find_checkpoint(root, flags.ckpt_step)
    with_optimizer = not (flags.finetune or flags.no_load_optim)
    saved = read_common(path)
    own = lora_record(config.lora) if state.adapts else None
    require_same_adapters(own, saved["common"].get(RECORD) if saved else None, path)
    if saved is None:
        if not flags.finetune:
            raise ValueError(
                f"checkpoint {path}: was not written by this trainer, which can load its weights and nothing "
                "else of it: wanted --finetune"
            )
        require_mtp(model_state(state), path)
        load_model_only(state, path)
        state.optimizer.reload_model_params()
        return iteration, {}
    common: dict[str, Any] = saved["common"]
    with_rng = not (flags.finetune or flags.no_load_rng) and common["layout"] == layout()
    with_rng = with_rng and common["has_rng"]
    if with_optimizer and not common["has_optimizer"]:
        raise ValueError(
            f"checkpoint {path} has no optimizer state: wanted --no-load-optim or another --load"
        )
    if with_optimizer:
        require_same_rule(config, common, path)
    options = {"with_optimizer": with_optimizer, "with_rng": with_rng}
    numbered = with_optimizer and numbers_layers_of_optimizer(path)
    template = sharded_state(flags, state, **options, loading=True, numbered=numbered)
    require_mtp(template["model"], path)
    template["model"] = without_foreign_head(template["model"], path)
    loaded = read_state(template, path)
    take(config, state, loaded, saved["scheduler"] if with_optimizer else None, root)
    if with_rng:
        set_random_state(loaded["rng"])
    load_others(config, state, path, with_optimizer)
    return iteration, common


def load_weights(state: TrainState, path: Path) -> None:
    """Collective. Overwrites all weights but adapters with those of the checkpoint directory ``path``.

    Raises:
        ValueError: it holds adapters alone.
    """
    saved = read_common(path)
    require_all_weights(saved["common"] if saved else {}, path)
    load_model_only(state, path)


def load_model_only(state: TrainState, path: str | Path) -> None:
    """Collective. Overwrites the live weights with those in the checkpoint directory ``path``.

    MTP layers stay as they are if it has none.
    """
    template = without_absent_mtp(without_foreign_head(model_state(state, layer_naming(path)), path), path)
    tensors, restore = split_objects(template)
    loaded = read_state({"model": tensors}, path, NothingInCommon())
    load_model(state, restore(loaded["model"]))


def load_trained(state: TrainState, path: str | Path) -> None:
    """Collective. Overwrites what trains with a `trained_state` that was saved in the directory ``path``."""
    if state.adapts:
        loaded = read_state({"model": trained_state(state)}, path, NothingInCommon())
        load_adapter_state(state.model, loaded["model"])
    else:
        load_model_only(state, path)


def _freezes(config: TrainerConfig) -> bool:
    """Whether layers of one kind may differ in what of them trains."""
    return bool(config.only_train_params_name_list or config.freeze_params_name_list)
