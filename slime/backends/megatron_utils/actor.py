"""The Megatron worker: one rank of the trainer."""

import gc
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slime.backends.megatron_utils.checkpoint import (
    CheckpointWriter,
    ModelContext,
    find_checkpoint,
    is_megatron_checkpoint,
    load_checkpoint,
    load_model_only,
    model_state,
)
from slime.backends.megatron_utils.data import tensorize
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights, supports_hf_weight_loading
from slime.backends.megatron_utils.initialize import init
from slime.backends.megatron_utils.model import setup_model_and_optimizer
from slime.backends.megatron_utils.named_params import named_params
from slime.backends.megatron_utils.offload import TrainerMemory
from slime.backends.megatron_utils.parallel import ParallelContext
from slime.backends.megatron_utils.training import Trainer
from slime.backends.megatron_utils.update_weight import UpdateWeightFromDistributed, UpdateWeightFromTensor
from slime.observability.timer import Timer
from slime.observability.train_metric_utils import perf_metrics, rollout_metrics
from slime.utils.accelerator import empty_cache
from slime.utils.flops_utils import calculate_fwd_flops
from slime.utils.tensor_backper import TensorBackuper
from slime.utils.types import EngineEndpoint, RolloutBatch

# Subdirectory of a checkpoint for a reference model that moves (--ref-update-interval).
_REF = "ref"


class MegatronTrainActor:
    """One rank of the trainer; the methods are collective over all ranks.

    Args:
        args: the parsed flags.
        role: "actor".
        with_ref: whether a reference model is kept, for KL terms.
    """

    def __init__(self, args: Namespace, role: str = "actor", with_ref: bool = False) -> None:
        self._args, self._role, self._with_ref = args, role, with_ref
        self._timer = Timer()
        self._updater: UpdateWeightFromTensor | UpdateWeightFromDistributed | None = None
        self._weight_version = 0

    def init(self) -> int:
        """Joins the process group that RANK, WORLD_SIZE and MASTER_* describe, builds and loads the model.

        Returns:
            The rollout id to start from.
        """
        args = self._args
        init(args)
        self._context = ParallelContext.current(args.data_pad_size_multiplier)
        resume = is_megatron_checkpoint(args.load)
        self._state = setup_model_and_optimizer(args, self._start_weights(resume), self._role)
        self._memory = TrainerMemory(self._state.model, self._state.optimizer)
        self._writer = CheckpointWriter(args)
        self._backups = TensorBackuper(lambda: named_params(self._state.model))
        next_rollout = 0
        if resume:
            next_rollout = self._resume()
        elif not supports_hf_weight_loading(args.load or "") and is_megatron_checkpoint(args.ref_load):
            self._load_ref_weights()
            self._state.optimizer.reload_model_params()
        if self._with_ref:
            self._make_reference(resume)
        self._trainer = Trainer(
            args, self._state, self._context, self._timer, self._backups if self._with_ref else None
        )
        return next_rollout

    def _start_weights(self, resume: bool) -> Callable[[list[torch.nn.Module]], None]:
        """What fills a new model: nothing if a checkpoint follows, else the first HF weights given."""
        if resume:
            return lambda chunks: None
        args = self._args
        given = [path for path in (args.load, args.ref_load) if path and supports_hf_weight_loading(path)]
        return lambda chunks: load_hf_weights(args, chunks, [*given, args.hf_checkpoint][0])

    def _resume(self) -> int:
        iteration, common = load_checkpoint(self._args, self._state, self._args.load)
        if self._args.finetune:
            return 0
        self._weight_version = common["weight_version"]
        return iteration + 1

    def _make_reference(self, resume: bool) -> None:
        self._backups.backup("actor")
        saved = None
        if resume:
            saved = find_checkpoint(self._args.load, getattr(self._args, "ckpt_step", None))[1] / _REF
        if saved is not None and saved.is_dir():
            load_model_only(self._state, saved)
        else:
            self._load_ref_weights()
        self._backups.backup(_REF)
        self._backups.restore("actor")

    def _load_ref_weights(self) -> None:
        path = self._args.ref_load or self._args.hf_checkpoint
        if is_megatron_checkpoint(path):
            load_model_only(self._state, find_checkpoint(path, getattr(self._args, "ref_ckpt_step", None))[1])
        else:
            load_hf_weights(self._args, self._state.model, path)

    def parallel_config(self) -> dict[str, int]:
        """What splitting a rollout over the ranks needs to know, and this rank's share of it."""
        return {
            "dp_size": self._context.dp_size,
            "cp_size": 1,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
            "dp_rank": self._context.dp_rank,
        }

    def train(self, rollout_id: int, rollout_data: RolloutBatch) -> dict[str, Any]:
        """Trains on this rank's shard of a rollout.

        Returns:
            On the main rank {"train": metrics of each optimizer step, "rollout": metrics of the batch,
            "perf": seconds and throughput}; empty elsewhere.
        """
        self._memory.require_all("train")
        self._writer.poll()
        with self._timer.measure("train"):
            with self._timer.measure("data_preprocess"):
                batch = tensorize(rollout_data, next(self._state.model[0].parameters()).device)
            steps = self._trainer.train(rollout_id, batch)
        seconds = self._timer.take()
        if not self._context.is_last_stage:
            return {}
        rollout = rollout_metrics(batch, sum(batch["global_batch_sizes"]), self._context.dp_group)
        lengths = rollout_data["total_lengths"]
        flops = calculate_fwd_flops(lengths, self._args)
        perf = perf_metrics(seconds, flops, sum(lengths), self._args.world_size)
        return {"train": steps, "rollout": rollout, "perf": perf} if self._context.is_main else {}

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Writes a checkpoint of iteration ``rollout_id``, and the Hugging Face copy if it is asked for."""
        self._memory.require_all("save_model")
        if self._args.save:
            moving_ref = self._with_ref and self._args.ref_update_interval is not None
            extra: dict[str, ModelContext] = {_REF: self._reference_state} if moving_ref else {}
            self._writer.save(rollout_id, self._state, {"weight_version": self._weight_version}, extra)
            if force_sync:
                self._writer.finish()
        if self._args.save_hf:
            path = self._args.save_hf.format(rollout_id=rollout_id)
            save_hf_model_to_path(self._args, path, self._state.model)

    @contextmanager
    def _reference_state(self) -> Iterator[dict[str, Any]]:
        """The reference's weights, in the place of the actor's while the context lasts."""
        self._backups.backup("actor")
        self._backups.restore(_REF)
        try:
            yield {"model": model_state(self._state)}
        finally:
            self._backups.restore("actor")

    def connect_rollout_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """Prepares weight sync with these engines, in place of those before."""
        if self._updater is None:
            kind = UpdateWeightFromTensor if self._args.colocate else UpdateWeightFromDistributed
            self._updater = kind(self._args, self._state.model)
        self._updater.connect_rollout_engines(endpoints)

    def update_weights(self) -> int:
        """Sends the weights to the connected engines.

        Returns:
            Their new version.

        Raises:
            RuntimeError: no engines were connected, or the weights are offloaded.
        """
        self._memory.require_weights("update_weights")
        if self._updater is None:
            raise RuntimeError("update_weights before connect_rollout_engines")
        self._updater.update_weights(self._weight_version + 1)
        self._weight_version += 1
        return self._weight_version

    def offload_training_state(self) -> None:
        """The first half of `sleep`: leaves the weights, which the engines are to be given."""
        self._memory.offload_training_state()
        self._release_cache()

    def sleep(self) -> None:
        """Moves weights and optimizer state to host memory and drops the gradients."""
        self._memory.offload()
        self._release_cache()

    def wake_up(self) -> None:
        """Undoes `sleep`."""
        self._memory.onload()

    def _release_cache(self) -> None:
        gc.collect()
        empty_cache()
