"""The Megatron trainer: one rank of one role."""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from slime.adapters.named import first_adapters
from slime.backends.megatron_utils.checkpoint import (
    CheckpointWriter,
    is_megatron_checkpoint,
    load_checkpoint,
    load_trained,
    load_weights,
)
from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
from slime.backends.megatron_utils.initialize import init
from slime.backends.megatron_utils.leftovers import is_hf_checkpoint
from slime.backends.megatron_utils.lora_checkpoint import adapter_params, load_peft, turn_off
from slime.backends.megatron_utils.named_adapters import MegatronAdapters
from slime.backends.megatron_utils.named_params import named_weights
from slime.backends.megatron_utils.optimizer import reset_optimizer_states
from slime.backends.megatron_utils.sharded_state import trained_state
from slime.backends.megatron_utils.step import (
    forward_only,
    overlapped_gathers,
    setup_model_and_optimizer,
    train_one_step,
)
from slime.backends.megatron_utils.tenant_steps import TenantSteps
from slime.config.run import run_config
from slime.models import family_of
from slime.training.adapter_export import save_trained
from slime.training.backend import Head, Outputs, Start
from slime.training.checkpoint_dir import find_checkpoint, saved_version
from slime.training.finite import require_finite
from slime.training.losses.reducers import LossFunction
from slime.training.memory import TrainerMemory
from slime.training.micro_batches import DataIterator
from slime.training.named_adapters import each_adapter
from slime.training.parallel import ParallelContext
from slime.training.save_attempts import Outcome, Writers
from slime.training.versions import TRAINED, WeightVersions
from slime.training.weights import FULL, Selected, Weights
from slime.utils.misc import load_function
from slime.utils.types import RolloutBatch


class MegatronBackend:
    """A `slime.training.backend.TrainBackend` on megatron-core."""

    def __init__(self, args: Namespace, role: str = "actor") -> None:
        self._config, self._role = run_config(args), role
        self._model_config, self._lora = self._config.model, self._config.lora
        self._adapts = role == "actor" and self._lora.adapts

    def load(self) -> Start:
        """Joins the process group, builds the model, fills it, and goes on where a checkpoint ended."""
        config = self._config
        init(config)
        self.context = ParallelContext.current()
        self._resumes = is_megatron_checkpoint(config.checkpoints.load)
        self.state = setup_model_and_optimizer(config, self._start_weights(), self._role)
        self.device = next(self.state.model[0].parameters()).device
        self.versions = WeightVersions(self._weights_of_versions)
        self._writers = Writers(config.checkpoints, partial(CheckpointWriter, config))
        # A checkpoint of adapters has no base.
        if not self._resumes or self.state.adapts:
            self._load_reference_weights()
        if self._adapts and self._lora.named_adapters:
            self._begin_each()
        self.memory = trainer_memory(self.state.model, self.state.optimizer, self.state.named)
        return self._resume() if self._resumes else Start()

    def _begin_each(self) -> None:
        """Makes the adapters; each begins as the model's own, or as ``--lora-adapter-path`` has it."""
        state = self.state
        state.named = MegatronAdapters(
            self._lora.named_adapters, state.model, state.optimizer, state.scheduler
        )
        for name, path in first_adapters(self._lora).items():
            if name is not None:
                state.named.put_in_place(name)
                load_peft(path, self._model_config, state.model)
                state.optimizer.reload_model_params()
        state.named.put_in_place(state.named.names[0])

    def _load_reference_weights(self) -> None:
        """Loads the weights of a Megatron checkpoint at ``--ref-load`` where no others are to be loaded."""
        reference = self._config.kl.ref_load
        if not is_hf_checkpoint(self._config.checkpoints.load or "") and is_megatron_checkpoint(reference):
            self._load_weights(reference or "", self._config.kl.ref_ckpt_step)
            self.state.optimizer.reload_model_params()

    def _start_weights(self) -> Callable[[list[torch.nn.Module]], None]:
        """What fills a new model: nothing if all of it is in a checkpoint that follows, else the first HF
        weights given, and an adapter.
        """
        config = self._config
        places = config.checkpoints.load, config.kl.ref_load
        given = [path for path in places if path and is_hf_checkpoint(path)]
        self._base = [*given, config.hf_checkpoint.hf_checkpoint][0]
        if self._resumes and not self._adapts:
            return lambda chunks: None
        return partial(self._fill, self._base)

    def _fill(self, path: str, chunks: list[torch.nn.Module]) -> None:
        load_hf_weights(self._model_config, chunks, path)
        if self._adapts and (adapter := first_adapters(self._lora).get(None)):
            load_peft(adapter, self._model_config, chunks)

    def _resume(self) -> Start:
        flags = self._config.checkpoints
        iteration, common = load_checkpoint(self._config, self.state, flags.load or "")
        return Start() if flags.finetune else Start(iteration + 1, common)

    def _weights_of_versions(self) -> Iterable[tuple[str, torch.Tensor]]:
        """What versions differ in: all weights, or the adapters of one base."""
        model = self.state.model
        return adapter_params(model).items() if self.state.adapts else named_weights(model)

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
        if is_megatron_checkpoint(path):
            load_weights(self.state, find_checkpoint(path, step)[1])
        else:
            load_hf_weights(self._model_config, self.state.model, path, with_mtp=False)

    def parallel_config(self) -> dict[str, int]:
        return {
            "dp_size": self.context.dp_size,
            "cp_size": self.context.cp_size,
            "vpp_size": len(self.state.model),
            # megatron-core's default: a chunk computes as many micro-batches in a row as there are stages.
            "microbatch_group_size_per_vp_stage": self._config.megatron.pipeline_model_parallel_size,
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
        return TenantSteps(self._config, self.state, self.context)

    def forward(self, batch: RolloutBatch, data: DataIterator, head: Head, prefix: str) -> Outputs:
        return forward_only(
            self._config, self.state, data, batch["num_microbatches"], self.context, head, prefix
        )

    def training(self) -> AbstractContextManager[None]:
        return self._optimizer_steps()

    @contextmanager
    def _optimizer_steps(self) -> Iterator[None]:
        with overlapped_gathers(self._config.megatron, self.state):
            yield
        if self.state.replay is not None:
            self.state.replay.forget_rollout()

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
            self._config,
            self.state,
            data,
            keys,
            loss,
            num_microbatches,
            step_global_batch_size,
            self.context,
            partial(self._before_step, rollout_id, step_id),
        )

    def _before_step(self, rollout_id: int, step_id: int) -> None:
        path, state = self._config.hooks.custom_megatron_before_train_step_hook_path, self.state
        if path:
            hook = load_function(path)
            hook(self._config.flat, rollout_id, step_id, state.model, state.optimizer, state.scheduler)

    def reset_optimizer(self) -> None:
        for _ in each_adapter(self.state):
            reset_optimizer_states(self.state.optimizer)

    def require_finite(self, what: str) -> None:
        require_finite(named_weights(self.state.model), what)
        if self.state.named is not None:
            require_finite(self.state.named.others(), what)

    def weights(self, form: str = FULL, adapter: str | None = None) -> Weights:
        weights = HfWeights(self._model_config, self.state.model, form)
        return weights if adapter is None else Selected(weights, partial(self.select, adapter))

    def save(
        self,
        rollout_id: int,
        common: Mapping[str, Any],
        versions: Sequence[str],
        wait: bool,
        memory: str | None = None,
    ) -> list[Outcome]:
        extra = {tag: partial(self._in_place_of_trained, tag) for tag in versions}
        begin = lambda writer: writer.save(rollout_id, self.state, dict(common), extra)
        return self._writers.save(memory, wait, begin)

    @contextmanager
    def _in_place_of_trained(self, tag: str) -> Iterator[dict[str, Any]]:
        """The weights of a version, in the place of the trained ones while the context lasts."""
        with self.versions.swapped(tag, TRAINED):
            yield {"model": trained_state(self.state)}

    def poll(self) -> None:
        self._writers.checkpoints.poll()

    def save_hf(self, path: str) -> None:
        names = lambda: family_of(self._model_config.model_type).weights.hf_names(self._model_config)
        save_trained(self._config, path, self._base if self.state.adapts else None, names, self.weights)


def trainer_memory(
    model: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    named: MegatronAdapters | None = None,
) -> TrainerMemory:
    """The memory of one rank.

    Args:
        named: adapters that are not in place are weights too, and have an optimizer's state.
    """

    def drop_gradients() -> None:
        for chunk in model:
            chunk.offload_grad_buffers()

    def restore_gradients() -> None:
        for chunk in model:
            chunk.restore_grad_buffers()

    return TrainerMemory(
        lambda: chain(
            (parameter for chunk in model for parameter in chunk.parameters()),
            (weight for _, weight in named.others()) if named else (),
        ),
        lambda: chain(_optimizer_tensors(optimizer), named.optimizer_tensors() if named else ()),
        drop_gradients,
        restore_gradients,
    )


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        # A rank without parameters of some kind has no optimizer for them.
        if part.optimizer is None:
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
