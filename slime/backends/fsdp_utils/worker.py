"""The FSDP trainer: one rank of one role."""

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from slime.adapters.named import first_adapters
from slime.backends.fsdp_utils.checkpoint import (
    CheckpointWriter,
    load_checkpoint,
    load_trained,
    load_weights,
    trained_tensors,
)
from slime.backends.fsdp_utils.forward import PackedForward
from slime.backends.fsdp_utils.hf_weights import FsdpHfTensors
from slime.backends.fsdp_utils.initialize import init
from slime.backends.fsdp_utils.loading import load_hf_weights
from slime.backends.fsdp_utils.lora import load_peft, turn_off
from slime.backends.fsdp_utils.loss_scale import loss_scale
from slime.backends.fsdp_utils.lr_scheduler import FSDPLRScheduler
from slime.backends.fsdp_utils.model import build_model, is_hf_checkpoint
from slime.backends.fsdp_utils.named_adapters import FsdpAdapters
from slime.backends.fsdp_utils.optimizer import build_optimizer, local, parameters_of, reset_states
from slime.backends.fsdp_utils.step import TrainState, forward_only, train_one_step
from slime.config.run import run_config
from slime.training.adapter_export import save_trained
from slime.training.backend import Head, Outputs, Start, TenantSteps
from slime.training.checkpoint_dir import MARKER, find_checkpoint, saved_version
from slime.training.finite import require_finite
from slime.training.losses.reducers import LossFunction
from slime.training.memory import TrainerMemory
from slime.training.micro_batches import DataIterator
from slime.training.named_adapters import each_adapter
from slime.training.optimizer_schedule import schedule_settings
from slime.training.parallel import ParallelContext
from slime.training.save_attempts import Outcome, Writers
from slime.training.versions import TRAINED, WeightVersions
from slime.training.weights import BASE, FULL, Selected, Weights
from slime.utils.types import RolloutBatch


class FSDPBackend:
    """A `slime.training.backend.TrainBackend` on torch's FSDP2."""

    def __init__(self, args: Namespace, role: str = "actor") -> None:
        self._config, self._role = run_config(args), role

    def load(self) -> Start:
        """Joins the process group, builds the model, fills it, and goes on where a checkpoint ended."""
        config = self._config
        mesh, self.device = init(config)
        self.context = ParallelContext.current()
        model = build_model(config, mesh, self._role)
        forward = PackedForward(model, config.fsdp.attn_implementation, self.device, self.context)
        optimizer = build_optimizer(config, model)
        scheduler = FSDPLRScheduler(optimizer, schedule_settings(config))
        scale, adapts = loss_scale(config.precision), self._role == "actor" and config.lora.adapts
        self.state = TrainState(model, forward, optimizer, scheduler, self.device, scale, adapts)
        self.memory = TrainerMemory(self._weight_tensors, self._optimizer_tensors, self._drop_gradients)
        self.versions = WeightVersions(self._trained_shards)
        self._writers = Writers(config.checkpoints, partial(CheckpointWriter, config))
        self._resumes = _is_checkpoint(config.checkpoints.load)
        start = self._start()
        forward.choose()
        return start

    def _start(self) -> Start:
        config, saved = self._config, self._config.checkpoints.load
        # Of a resumed run too: a checkpoint does not hold what a model computes from its config.
        self._load_start_weights()
        if self.state.adapts and config.lora.named_adapters:
            state = self.state
            of_model = state.model, state.optimizer, state.scheduler, state.loss_scale
            state.named = FsdpAdapters(config.lora.named_adapters, *of_model)
            for name, path in first_adapters(config.lora).items():
                if name is not None:
                    state.named.select(name)
                    load_peft(path, state.model)
            state.named.select(config.lora.named_adapters[0])
        if self._resumes and saved:
            iteration, common = load_checkpoint(config, self.state, saved)
            return Start() if config.checkpoints.finetune else Start(iteration + 1, common)
        return Start()

    def _load_start_weights(self) -> None:
        """Loads what a new run starts with, and the base of adapters, which no checkpoint of theirs holds."""
        config, saved, reference = self._config, self._config.checkpoints.load, self._config.kl.ref_load
        given = [path for path in (saved, reference) if path and is_hf_checkpoint(path)]
        self._base = [*given, config.hf_checkpoint.hf_checkpoint][0]
        load_hf_weights(config.hf_checkpoint, self.state.model, self._base)
        begins = self.state.adapts or not (self._resumes or is_hf_checkpoint(saved))
        if begins and reference and _is_checkpoint(reference):
            self._load_weights(reference, config.kl.ref_ckpt_step)
        if self.state.adapts and (path := first_adapters(config.lora).get(None)):
            load_peft(path, self.state.model)

    def load_version(self, tag: str, path: str, step: int | None = None) -> None:
        self.versions.backup(TRAINED)
        run = self._config.checkpoints
        saved = saved_version(run.load or "", run.ckpt_step, tag) if self._resumes else None
        if saved is not None:
            load_trained(self.state, saved)
        elif self.state.adapts:
            turn_off(self.state.model)
        else:
            self._load_weights(path, step)
        self.versions.backup(tag)
        self.versions.restore(TRAINED)

    def _load_weights(self, path: str, step: int | None) -> None:
        if _is_checkpoint(path):
            load_weights(self.state, find_checkpoint(path, step)[1])
        else:
            load_hf_weights(self._config.hf_checkpoint, self.state.model, path)

    def parallel_config(self) -> dict[str, int]:
        return {
            "dp_size": self.context.dp_size,
            "cp_size": self.context.cp_size,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
            "dp_rank": self.context.dp_rank,
        }

    def select(self, adapter: str) -> None:
        named = self.state.named
        if named is None:
            raise ValueError(f"adapter {adapter!r}: adapters have no names here (wanted: --lora-adapters)")
        named.select(adapter)
        if self.versions.backup_tags:
            self.versions.backup(TRAINED)

    def tenant_steps(self) -> TenantSteps:
        raise ValueError("tenants: this trainer keeps no gradients (wanted: --train-backend megatron)")

    def forward(self, batch: RolloutBatch, data: DataIterator, head: Head, prefix: str) -> Outputs:
        count = sum(batch["num_microbatches"])
        return forward_only(self.state, data, count, self.context, head, prefix)

    def training(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(
        self,
        rollout_id: int,
        step_id: int,
        data: DataIterator,
        keys: Sequence[str],
        loss: LossFunction,
        num_microbatches: int,
        step_global_batch_size: int,
    ) -> dict[str, float]:
        return train_one_step(
            self._config, self.state, data, keys, loss, num_microbatches, step_global_batch_size, self.context
        )

    def reset_optimizer(self) -> None:
        for _ in each_adapter(self.state):
            reset_states(self.state.optimizer)

    def require_finite(self, what: str) -> None:
        require_finite(self._named_shards(), what)
        if self.state.named is not None:
            require_finite(self.state.named.others(), what)

    def weights(self, form: str = FULL, adapter: str | None = None) -> Weights:
        weights = FsdpHfTensors(self.state.model, self._config.precision.params_dtype, form)
        return weights if adapter is None else Selected(weights, partial(self.select, adapter))

    def save(
        self,
        rollout_id: int,
        common: Mapping[str, Any],
        versions: Sequence[str],
        wait: bool,
        memory: str | None = None,
    ) -> list[Outcome]:
        extra = {tag: partial(self.versions.swapped, tag, TRAINED) for tag in versions}
        begin = lambda writer: writer.save(rollout_id, self.state, common, extra)
        return self._writers.save(memory, wait, begin)

    def poll(self) -> None:
        self._writers.checkpoints.poll()

    def save_hf(self, path: str) -> None:
        names = lambda: [info.name for info in self.weights(BASE).manifest()]
        save_trained(self._config, path, self._base if self.state.adapts else None, names, self.weights)

    def _named_shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, local(param)) for name, param in self.state.model.named_parameters())

    def _trained_shards(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What versions differ in: all weights, or the adapters of one base."""
        if not self.state.adapts:
            return self._named_shards()
        return ((name, local(tensor)) for name, tensor in trained_tensors(self.state).items())

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        named = self.state.named
        others = (weight for _, weight in named.others()) if named else ()
        return chain(map(local, self.state.model.parameters()), others)

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for param in parameters_of(self.state.optimizer):
            yield from map(local, self.state.optimizer.state[param].values())
        if self.state.named:
            yield from self.state.named.optimizer_tensors()

    def _drop_gradients(self) -> None:
        self.state.optimizer.zero_grad(set_to_none=True)


def _is_checkpoint(path: str | Path | None) -> bool:
    """Whether ``path`` has at least one complete checkpoint of a trainer."""
    return path is not None and (Path(path) / MARKER).is_file()
