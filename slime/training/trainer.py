"""What happens to one rollout in the trainer: passes, advantages, optimizer steps."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch

from slime.config.loss import LOSSES
from slime.config.profiling import Target
from slime.config.training import TrainingConfig
from slime.observability.logging_utils import take_logged
from slime.observability.profiling import profiled
from slime.observability.timer import Timer
from slime.training.adapter_steps import Part, metrics_of_step, num_steps, runs_of, steps_of
from slime.training.advantages import compute_advantages_and_returns
from slime.training.backend import Outputs, TrainBackend
from slime.training.batch import loss_fields
from slime.training.dumps import dump_batch, to_host
from slime.training.invariants import check_invariants
from slime.training.losses.policy import OWN_LOG_PROBS
from slime.training.losses.reducers import LossFunction
from slime.training.mean_weights import add_mean_weights
from slime.training.micro_batches import DataIterator, to_device
from slime.training.passes import AFTER, BEFORE, Pass
from slime.training.roles import ACTOR, Role
from slime.training.versions import OLD_ACTOR, REFERENCE, ROLLOUT_ACTOR, TRAINED
from slime.utils.misc import load_function
from slime.utils.types import RolloutBatch


@dataclass
class Trained:
    """The outcome of a rollout on one rank.

    Attributes:
        steps: per optimizer step its metrics ``train/...``; empty dicts before the last pipeline stage.
        outputs: what the role has for other roles, on the host.
        policy: metrics of the policy before the steps, of which no pass told; see `policy_before_step`.
    """

    steps: list[dict[str, Any]]
    outputs: Outputs = field(default_factory=dict)
    policy: dict[str, float] = field(default_factory=dict)


def policy_before_step(steps: list[dict[str, Any]]) -> dict[str, float]:
    """``rollout/log_probs`` and ``rollout/entropy`` where the only step's loss took its own log-probs.

    What the loss says of them is taken out of the steps' metrics.
    """
    own = [step.pop(f"train/{OWN_LOG_PROBS}", None) for step in steps]
    if len(own) != 1 or own[0] is None:
        return {}
    return {"rollout/log_probs": own[0], "rollout/entropy": steps[0]["train/entropy_loss"]}


def select_loss(config: TrainingConfig, role: Role = ACTOR) -> LossFunction:
    """The loss of a role: its own, else that of ``--loss-type``."""
    loss_type = role.loss_type or config.loss.loss_type
    if loss_type == "custom_loss" and config.loss.custom_loss_function_path:
        return partial(_of_float32(load_function(config.loss.custom_loss_function_path)), config.flat)
    return partial(load_function(LOSSES[loss_type]), config)


def _of_float32(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A user's loss, whose logits are float32 where the model's are narrower."""

    @wraps(loss)
    def call(args: Any, batch: Any, logits: torch.Tensor, reducer: Any) -> Any:
        return loss(args, batch, logits.to(torch.promote_types(logits.dtype, torch.float32)), reducer)

    return call


class Trainer:
    """Trains the model of a role on rollouts."""

    def __init__(self, config: TrainingConfig, role: Role, backend: TrainBackend, timer: Timer) -> None:
        self._config, self._role, self._backend, self._timer = config, role, backend, timer
        self._loss = select_loss(config, role)

    def train(self, rollout_id: int, batch: RolloutBatch, inputs: Mapping[str, Any] | None = None) -> Trained:
        """One rollout.

        Args:
            batch: this rank's shard, after `tensorize`; gets the outputs of the passes and the advantages.
            inputs: fields that another role has computed for the samples of this shard.
        """
        config, context = self._config, self._backend.context
        batch |= to_device(inputs or {}, self._backend.device)
        data = DataIterator(batch, batch["micro_batch_indices"])
        if config.advantages.compute_advantages_and_returns:
            with self._profiled("train_log_probs", rollout_id):
                for forward_pass in self._due_passes(num_steps(batch)):
                    self._run(forward_pass, batch, data)
            outputs = {key: to_host(batch[key]) for key in self._role.outputs if key in batch}
            if context.is_last_stage:
                with self._timer.spans.measure("advantages", rollout=rollout_id):
                    compute_advantages_and_returns(config, batch)
        else:
            outputs = {}
        if config.hooks.rollout_data_postprocess_path:
            load_function(config.hooks.rollout_data_postprocess_path)(config.flat, rollout_id, batch)
        # Of what is trained: the hook may have changed masks and log-probs.
        if (
            config.advantages.compute_advantages_and_returns
            and config.off_policy.tis_needs_mean
            and context.is_last_stage
        ):
            add_mean_weights(config.off_policy, batch, context)
        if config.debug.save_debug_log_probs:
            self._run(BEFORE, batch, data)
        with self._profiled("train_actor", rollout_id), self._timer.measure(self._role.steps):
            steps = self._optimizer_steps(rollout_id, batch, data.reset())
        policy = policy_before_step(steps)
        if config.ci.ci_test and context.is_last_stage and self._role is ACTOR:
            check_invariants(config, rollout_id, steps)
        if config.debug.save_debug_log_probs:
            self._run(AFTER, batch, data)
        dump_batch(config.debug, rollout_id, batch, context)
        self._refresh_versions(rollout_id)
        return Trained(steps, outputs, policy)

    def _profiled(self, target: Target, rollout_id: int) -> AbstractContextManager[None]:
        return profiled(self._config.profiling, target, rollout_id, self._role.prefix)

    def _due_passes(self, num_steps: int) -> list[Pass]:
        return [p for p in self._role.passes if p.when(self._config, num_steps)]

    def _run(self, forward_pass: Pass, batch: RolloutBatch, data: DataIterator) -> None:
        backend, head = self._backend, partial(forward_pass.head, self._config)
        outputs: Outputs = {}
        data.reset()
        with self._timer.measure(forward_pass.name):
            for adapter, counts in runs_of(batch):
                self._select(adapter)
                with backend.versions.entered(forward_pass.tag):
                    own = {**batch, "num_microbatches": counts}
                    found = backend.forward(own, data, head, forward_pass.prefix)
                for key, values in found.items():
                    outputs.setdefault(key, []).extend(values)
        batch |= outputs

    def _select(self, adapter: str | None) -> None:
        if adapter is not None:
            self._backend.select(adapter)

    def _optimizer_steps(
        self, rollout_id: int, batch: RolloutBatch, data: DataIterator
    ) -> list[dict[str, Any]]:
        if self._config.off_policy.reset_optimizer_states:
            self._backend.reset_optimizer()
        keys = loss_fields(batch)
        steps = []
        with self._backend.training():
            for parts in steps_of(batch):
                with self._timer.spans.measure("optimizer_step", rollout=rollout_id, step=parts[0].step):
                    found = [self._step(rollout_id, part, data, keys) for part in parts]
                metrics = metrics_of_step(parts, found)
                metrics["global_batch_size"] = sum(part.rollouts for part in parts)
                named = {f"train/{self._role.prefix}{name}": value for name, value in metrics.items()}
                steps.append({**named, **take_logged("train")})
        return steps

    def _step(self, rollout_id: int, part: Part, data: DataIterator, keys: list[str]) -> dict[str, float]:
        """Trains one adapter, or what there is to train, on its micro-batches of a step."""
        self._select(part.adapter)
        return self._backend.step(
            rollout_id, part.step, data, keys, self._loss, part.num_microbatches, part.rollouts
        )

    def _refresh_versions(self, rollout_id: int) -> None:
        versions, interval = self._backend.versions, self._config.kl.ref_update_interval
        if not versions.backup_tags:
            return
        versions.backup(TRAINED)
        if self._config.off_policy.keep_old_actor:
            # The next rollout is under way already, whatever the engines are sent before it is trained.
            versions.copy(src_tag=ROLLOUT_ACTOR, dst_tag=OLD_ACTOR)
        if interval is not None and (rollout_id + 1) % interval == 0:
            versions.copy(src_tag=TRAINED, dst_tag=REFERENCE)
