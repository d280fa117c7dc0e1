"""What happens to one rollout in the trainer: log-probs, advantages, optimizer steps."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.advantages import compute_advantages_and_returns
from slime.backends.megatron_utils.ci_checks import check_invariants
from slime.backends.megatron_utils.data import DataIterator
from slime.backends.megatron_utils.model import TrainState, forward_only, train_one_step
from slime.backends.megatron_utils.optimizer import reset_optimizer_states
from slime.backends.megatron_utils.parallel import ParallelContext
from slime.observability.timer import Timer
from slime.utils.misc import load_function
from slime.utils.tensor_backper import TensorBackuper
from slime.utils.types import RolloutBatch


class Trainer:
    """Trains a model on rollouts.

    Args:
        backups: weights under the tags "actor" and "ref"; None without a reference model.
    """

    def __init__(
        self,
        args: Namespace,
        state: TrainState,
        context: ParallelContext,
        timer: Timer,
        backups: TensorBackuper | None,
    ) -> None:
        self._args, self._state, self._context = args, state, context
        self._timer, self._backups = timer, backups

    def train(self, rollout_id: int, batch: RolloutBatch) -> list[dict[str, Any]]:
        """One rollout; ``batch`` (this rank's shard, after `tensorize`) gets the log-probs and advantages.

        Returns:
            Per optimizer step its metrics ``train/...``; empty dicts before the last pipeline stage.
        """
        args = self._args
        data = DataIterator(batch, batch["micro_batch_indices"])
        if args.compute_advantages_and_returns:
            self._add_log_probs(batch, data)
            if self._context.is_last_stage:
                compute_advantages_and_returns(args, batch, self._context)
        if args.rollout_data_postprocess_path:
            load_function(args.rollout_data_postprocess_path)(args, rollout_id, batch)
        with self._timer.measure("actor_train"):
            steps = self._optimizer_steps(rollout_id, batch, data.reset())
        if args.ci_test and self._context.is_last_stage:
            check_invariants(args, rollout_id, steps)
        self._dump(rollout_id, batch)
        self._refresh_backups(rollout_id)
        return steps

    def _add_log_probs(self, batch: RolloutBatch, data: DataIterator) -> None:
        counts = batch["num_microbatches"]
        if self._backups is not None:
            with self._timer.measure("ref_log_probs"):
                self._backups.restore("ref")
                batch |= forward_only(
                    self._args, self._state, data.reset(), counts, self._context, store_prefix="ref_"
                )
                self._backups.restore("actor")
        if needs_own_log_probs(self._args, num_steps=len(counts)):
            with self._timer.measure("log_probs"):
                batch |= forward_only(
                    self._args,
                    self._state,
                    data.reset(),
                    counts,
                    self._context,
                    with_entropy=self._args.use_rollout_entropy,
                )

    def _optimizer_steps(
        self, rollout_id: int, batch: RolloutBatch, data: DataIterator
    ) -> list[dict[str, Any]]:
        args, state = self._args, self._state
        if args.reset_optimizer_states:
            reset_optimizer_states(state.optimizer)
        overlap = getattr(args, "overlap_param_gather", False)
        if overlap:
            for chunk in state.model:
                chunk.enable_forward_pre_hook()
        counts, sizes = batch["num_microbatches"], batch["global_batch_sizes"]
        steps = []
        for step_id, (count, size) in enumerate(zip(counts, sizes, strict=True)):
            hook = lambda step_id=step_id: self._before_step(rollout_id, step_id)
            metrics = train_one_step(args, state, data, count, size, self._context, hook)
            step = {"global_batch_size": size, "step": rollout_id * len(counts) + step_id}
            steps.append({f"train/{name}": value for name, value in {**metrics, **step}.items()})
        if overlap:
            # The last update would otherwise be gathered only in the next forward pass.
            for chunk in state.model:
                chunk.disable_forward_pre_hook(param_sync=True)
        return steps

    def _before_step(self, rollout_id: int, step_id: int) -> None:
        path = self._args.custom_megatron_before_train_step_hook_path
        if path:
            state = self._state
            load_function(path)(
                self._args, rollout_id, step_id, state.model, state.optimizer, state.scheduler
            )

    def _refresh_backups(self, rollout_id: int) -> None:
        if self._backups is None:
            return
        self._backups.backup("actor")
        interval = self._args.ref_update_interval
        if interval is not None and (rollout_id + 1) % interval == 0:
            self._backups.copy(src_tag="actor", dst_tag="ref")

    def _dump(self, rollout_id: int, batch: RolloutBatch) -> None:
        """Writes what was trained on, shard by shard, to the template of ``--save-debug-train-data``."""
        template = self._args.save_debug_train_data
        if not template or not self._context.is_last_stage or self._context.tp_rank != 0:
            return
        shard = {key: _to_host(value) for key, value in batch.items()}
        shards: list[Any] = [None] * self._context.dp_size
        dist.all_gather_object(shards, shard, group=self._context.dp_group)
        if self._context.is_main:
            path = Path(template.format(rollout_id=rollout_id))
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"rollout_id": rollout_id, "shards": shards}, path)


def needs_own_log_probs(args: Namespace, num_steps: int) -> bool:
    """Whether the policy's log-probs are computed before training.

    Not if the engine's are used; nor if the loss can take its own, detached, because there is a single
    optimizer step, and nothing before it reads them.
    """
    if args.use_rollout_logprobs and not args.get_mismatch_metrics:
        return False
    reusable = (
        num_steps == 1
        and args.loss_type == "policy_loss"
        and args.kl_coef == 0
        and args.advantage_estimator != "gspo"
        and not args.get_mismatch_metrics
        and not args.use_rollout_entropy
        and not args.custom_advantage_function_path
        and not args.rollout_data_postprocess_path
    )
    return not reusable


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return [_to_host(item) for item in value] if isinstance(value, list) else value
