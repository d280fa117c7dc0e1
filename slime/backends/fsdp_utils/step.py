"""Forward passes and optimizer steps of a `transformers` model over packed micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.forward import PackedForward
from slime.backends.fsdp_utils.lora import require_used
from slime.backends.fsdp_utils.loss_scale import LossScale
from slime.backends.fsdp_utils.lr_scheduler import FSDPLRScheduler
from slime.backends.fsdp_utils.model import prepare_for_gradients
from slime.backends.fsdp_utils.named_adapters import FsdpAdapters
from slime.backends.fsdp_utils.optimizer import clip_factor, gradient_norm, local, scale
from slime.config.backend import BackendConfig
from slime.observability.train_metric_utils import reduce_train_step_metrics
from slime.training.backend import Head, Outputs
from slime.training.finite import gradients_not_finite
from slime.training.losses.reducers import LossFunction
from slime.training.losses.scaling import loss_function
from slime.training.micro_batches import DataIterator, packed_micro_batch
from slime.training.parallel import ParallelContext


@dataclass
class TrainState:
    """What a rank trains: its shard of the model, its optimizer and schedule.

    Attributes:
        device: where it computes, which with ``--fsdp-cpu-offload`` is not where the shards are.
        loss_scale: of float16 only.
        adapts: whether adapters train, and nothing else does.
        named: these, where there are several.
    """

    model: PreTrainedModel
    forward: PackedForward
    optimizer: torch.optim.Optimizer
    scheduler: FSDPLRScheduler
    device: torch.device
    loss_scale: LossScale | None = None
    adapts: bool = False
    named: FsdpAdapters | None = None


@torch.no_grad()
def forward_only(
    state: TrainState,
    data: DataIterator,
    num_microbatches: int,
    context: ParallelContext,
    head: Head,
    prefix: str,
) -> Outputs:
    """What ``head`` computes for all samples of the next micro-batches, ``prefix`` before the names."""
    state.model.eval()
    outputs: Outputs = {}
    for _ in range(num_microbatches):
        batch = packed_micro_batch(data, (), context.pad_multiple, context)
        for key, values in head(state.forward(batch["inputs"]), batch).items():
            outputs.setdefault(prefix + key, []).extend(values)
    return outputs


def train_one_step(
    config: BackendConfig,
    state: TrainState,
    data: DataIterator,
    keys: Sequence[str],
    loss: LossFunction,
    num_microbatches: int,
    step_global_batch_size: int,
    context: ParallelContext,
) -> dict[str, float]:
    """One optimizer step over this rank's next micro-batches; of several adapters that which is selected.

    Returns:
        Its metrics without a prefix, reduced over all ranks.

    Raises:
        NotFinite: NaN or infinity in the gradients, unless such steps are skipped.
        ValueError: an adapter has no part in what the model computes.
    """
    prepare_for_gradients(state.model)
    if state.named:
        state.named.select_optimizer()
    state.optimizer.zero_grad(set_to_none=True)
    results, tokens = [], torch.zeros((), device=state.device)
    for _ in range(num_microbatches):
        batch = packed_micro_batch(data, keys, context.pad_multiple, context)
        scaled, normaliser, report = loss_function(
            config.loss,
            batch,
            num_microbatches,
            step_global_batch_size,
            loss,
            state.forward(batch["inputs"]),
            context,
        )
        scaled = scaled if config.loss.calculate_per_token_loss else scaled / num_microbatches
        (scaled if state.loss_scale is None else scaled * state.loss_scale.factor).backward()
        tokens += normaliser
        results.append(report)
    if state.adapts:
        require_used(state.model)
    norm = _finish_gradients(config, state, tokens)
    rates = [float(group["lr"]) for group in state.optimizer.param_groups]
    of_step = _take_step(config, state, norm)
    if not of_step.get("skipped"):
        # The schedule of one adapter of several counts its steps, however many rollouts each has.
        state.scheduler.step(config.batches.global_batch_size if state.named else step_global_batch_size)
    metrics = reduce_train_step_metrics(
        results,
        calculate_per_token_loss=config.loss.calculate_per_token_loss,
        step_global_batch_size=step_global_batch_size,
        dp_with_cp_group=context.dp_group,
    )
    return {**metrics, **of_step, **{f"lr-pg_{i}": rate for i, rate in enumerate(rates)}}


def _take_step(config: BackendConfig, state: TrainState, norm: float) -> dict[str, float]:
    """Moves the weights, unless the gradients are not finite and that does not end the run. Its metrics."""
    metrics = {"grad_norm": norm}
    if _skips(config, state):
        skipped = not math.isfinite(norm)
        if state.loss_scale is not None:
            state.loss_scale.update(skipped)
        # As Megatron-LM reports it: a step that is skipped has no norm.
        metrics = {"skipped": 1.0} if skipped else {"skipped": 0.0, **metrics}
    if not metrics.get("skipped"):
        if config.megatron.log_num_zeros_in_grad:
            metrics["num_zeros_in_grad"] = _count_zeros(state)
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    return metrics


def _skips(config: BackendConfig, state: TrainState) -> bool:
    """Whether steps with NaN or infinity in their gradients are skipped; else they end the run."""
    return state.loss_scale is not None or config.precision.no_check_for_nan_in_loss_and_grad


def _gradients(state: TrainState) -> list[torch.Tensor]:
    return [local(param.grad) for param in state.model.parameters() if param.grad is not None]


def _finish_gradients(config: BackendConfig, state: TrainState, tokens: torch.Tensor) -> float:
    """Makes means of the gradients, which FSDP has averaged over the ranks, and clips them; their norm."""
    gradients = _gradients(state)
    if config.loss.calculate_per_token_loss:
        # The ranks of a context-parallel group count the same tokens; losses are scaled by its size.
        dist.all_reduce(tokens)
        scale(gradients, dist.get_world_size() / float(tokens))
    if state.loss_scale is not None:
        scale(gradients, 1 / state.loss_scale.factor)
    norm = gradient_norm(gradients, tokens.device)
    if not (math.isfinite(norm) or _skips(config, state)):
        weights = ((name, local(param)) for name, param in state.model.named_parameters())
        raise gradients_not_finite(weights, f"gradient norm {norm}")
    scale(gradients, clip_factor(norm, config.optimizer.clip_grad))
    return norm


@torch.no_grad()
def _count_zeros(state: TrainState) -> float:
    zeros: Any = sum((gradient == 0).sum() for gradient in _gradients(state))
    total = torch.as_tensor(zeros, dtype=torch.float32)
    dist.all_reduce(total)
    return float(total)
