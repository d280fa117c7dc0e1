"""The model with its optimizer: forward passes and optimizer steps through megatron-core's schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from slime.backends.megatron_utils.data import get_batch
from slime.backends.megatron_utils.model_provider import get_model
from slime.backends.megatron_utils.moe import (
    in_half,
    kept_biases,
    padding_mask,
    router_losses,
    router_metrics,
)
from slime.backends.megatron_utils.mtp_step import MtpTraining
from slime.backends.megatron_utils.named_adapters import MegatronAdapters
from slime.backends.megatron_utils.named_params import named_params
from slime.backends.megatron_utils.optimizer import (
    build_optimizer,
    build_scheduler,
    ddp_config,
    refuses_nan,
)
from slime.backends.megatron_utils.routing_replay import RoutingReplay
from slime.config.backend import BackendConfig
from slime.config.megatron import MegatronConfig
from slime.models.mtp import trained_mtp_layers
from slime.observability.train_metric_utils import reduce_train_step_metrics
from slime.training.backend import Head, Outputs
from slime.training.finite import gradients_not_finite
from slime.training.inputs import PackedInputs
from slime.training.losses.reducers import LossFunction
from slime.training.losses.scaling import counted_tokens, loss_function
from slime.training.micro_batches import DataIterator
from slime.training.parallel import ParallelContext
from slime.utils.misc import load_function


@dataclass
class TrainState:
    """What a trainer rank trains: the wrapped model chunks, their optimizer and its schedule.

    ``replay`` is None where routers choose experts anew in each pass, ``mtp`` where MTP layers
    do not train. With ``adapts`` adapters train, and nothing else does; ``named`` has them where there are
    several.
    """

    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    replay: RoutingReplay | None = None
    mtp: MtpTraining | None = None
    adapts: bool = False
    named: MegatronAdapters | None = None


def setup_model_and_optimizer(
    config: BackendConfig, load: Callable[[list[torch.nn.Module]], None], role: str = "actor"
) -> TrainState:
    """Builds the model, fills it with ``load``, wraps it for data parallelism and makes the optimizer."""
    chunks = get_model(config, role)
    load(chunks)
    core = get_model_config(chunks[0])
    if config.precision.params_dtype != torch.float32:
        chunks = [in_half(core, chunk) for chunk in chunks]
    model = [
        DistributedDataParallel(core, ddp_config(config), chunk, disable_bucketing=i > 0)
        for i, chunk in enumerate(chunks)
    ]
    optimizer = build_optimizer(config, model)
    _connect(config.megatron, model, optimizer)
    replay = None
    if role == "actor" and config.off_policy.use_routing_replay:
        replay = RoutingReplay(model, from_engine=config.off_policy.use_rollout_routing_replay)
    mtp = MtpTraining(config, model) if role == "actor" and trained_mtp_layers(config.mtp) else None
    adapts = role == "actor" and config.lora.adapts
    return TrainState(model, optimizer, build_scheduler(config, optimizer), replay, mtp, adapts)


def _connect(
    config: MegatronConfig, model: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Tells megatron-core's schedules how to scale losses and reduce gradients."""
    core = get_model_config(model[0])
    core.grad_scale_func = optimizer.scale_loss
    core.finalize_model_grads_func = finalize_model_grads
    if config.overlap_grad_reduce:
        core.no_sync_func = _of_chunks([chunk.no_sync for chunk in model])
    if config.overlap_param_gather and config.align_param_gather:
        core.param_sync_func = _of_chunks([chunk.start_param_sync for chunk in model])
    if config.overlap_param_gather:
        # Only training steps leave weights to be gathered; `overlapped_gathers` turns this on around them.
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=False)


def _of_chunks(functions: list[Callable]) -> Any:
    """megatron-core wants the function itself where there is one chunk."""
    return functions if len(functions) > 1 else functions[0]


@contextmanager
def overlapped_gathers(config: MegatronConfig, state: TrainState) -> Iterator[None]:
    """Around optimizer steps: an update is gathered in the next forward pass, the last one at the end."""
    if not config.overlap_param_gather:
        yield
        return
    for chunk in state.model:
        chunk.enable_forward_pre_hook()
    yield
    for chunk in state.model:
        chunk.disable_forward_pre_hook(param_sync=True)


def _forward(
    data: DataIterator,
    model: torch.nn.Module,
    keys: Sequence[str],
    context: ParallelContext,
    replay: RoutingReplay | None,
    training: bool,
) -> tuple[dict[str, Any], torch.Tensor]:
    """The next micro-batch, with ``keys``, and what the model computes of it.

    Logits [1, T / cp, V / tp] on the last pipeline stage, hidden states before it.
    """
    number, fields = data.number, replay.fields if replay else ()
    batch = get_batch(data, [*keys, *fields], context.pad_multiple, context)
    inputs: PackedInputs = batch["inputs"]
    inputs.refuse_media("the model")
    with replay.micro_batch(model, batch, number, training) if replay else nullcontext():
        return batch, model(
            input_ids=inputs.tokens,
            position_ids=None,  # layers read them off the layout
            attention_mask=None,
            packed_seq_params=batch["packed_seq_params"],
            padding_mask=padding_mask(model, inputs),
        )


def _run_schedule(
    state: TrainState, forward_step: Callable, data: DataIterator, num_microbatches: int, **options: Any
) -> list[Any]:
    """The results of the micro-batches; empty before the last pipeline stage.

    Each model chunk reads the same micro-batches, on its own.
    """
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[data, *(copy(data) for _ in state.model[1:])],
        model=state.model,
        num_microbatches=num_microbatches,
        # Unused: packed batches have variable lengths.
        seq_length=1,
        micro_batch_size=1,
        **options,
    )


@torch.no_grad()
def forward_only(
    config: BackendConfig,
    state: TrainState,
    data: DataIterator,
    num_microbatches: Sequence[int],
    context: ParallelContext,
    head: Head,
    store_prefix: str = "",
) -> Outputs:
    """What ``head`` computes for all samples of this rank's shard, in the order of its micro-batches.

    Without a prefix it is of the policy's own weights, whose routes are replayed or recorded.

    Returns:
        On the last pipeline stage the head's values, ``store_prefix`` before their names. Empty elsewhere.
    """
    if path := config.hooks.custom_megatron_before_log_prob_hook_path:
        load_function(path)(config.flat, state.model, store_prefix)

    def collect(batch: dict[str, Any], logits: torch.Tensor, non_loss_data: bool = True) -> Outputs:
        return head(logits, batch)

    replay = None if store_prefix else state.replay

    def forward_step(
        iterator: DataIterator, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch, output = _forward(iterator, model, (), context, replay, training=False)
        return output, partial(collect, batch)

    for chunk in state.model:
        chunk.eval()
    outputs: Outputs = {}
    for count in num_microbatches:
        options = {"forward_only": True, "collect_non_loss_data": True}
        for result in _run_schedule(state, forward_step, data, count, **options):
            for key, values in result.items():
                outputs.setdefault(store_prefix + key, []).extend(values)
    for chunk in state.model:
        chunk.train()
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
    before_step: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """One optimizer step over this rank's next micro-batches; of several adapters that which is selected.

    Returns:
        The step's metrics without a prefix, reduced over all ranks; on the last pipeline stage only.

    Raises:
        RuntimeError: the optimizer refused the step (NaN or Inf in the gradients).
    """
    forget_gradients(state)
    before_step()
    restore_biases = kept_biases(state.model)
    weight = _router_loss_weight(config, data, num_microbatches, context)
    further = state.mtp.step(data, num_microbatches, context) if state.mtp else nullcontext()
    with router_losses(state.model, weight), further:
        size = step_global_batch_size
        results = gradients(config, state, data, keys, loss, num_microbatches, size, context)
    if state.replay:
        state.replay.forget_step()
    learning_rates = [float(group["lr"]) for group in state.optimizer.param_groups]
    succeeded, grad_norm, num_zeros = _update(config, state, step_global_batch_size, restore_biases)
    further_losses = router_metrics(state.model, num_microbatches)
    further_losses |= state.mtp.metrics() if state.mtp else {}
    if not context.is_last_stage:
        return {}
    metrics = reduce_train_step_metrics(
        results,
        calculate_per_token_loss=config.loss.calculate_per_token_loss,
        step_global_batch_size=step_global_batch_size,
        dp_with_cp_group=context.dp_group,
    )
    # As float16 finds its loss scale by steps that overflow; they have no norm.
    if not refuses_nan(config.precision):
        metrics["skipped"] = float(not succeeded)
    if grad_norm is not None:
        metrics["grad_norm"] = float(grad_norm)
    if num_zeros is not None:
        metrics["num_zeros_in_grad"] = float(num_zeros)
    metrics.update(further_losses, **{f"lr-pg_{i}": rate for i, rate in enumerate(learning_rates)})
    return metrics


def gradients(
    config: BackendConfig,
    state: TrainState,
    data: DataIterator,
    keys: Sequence[str],
    loss: LossFunction,
    num_microbatches: int,
    step_global_batch_size: int,
    context: ParallelContext,
) -> list[Any]:
    """Adds those of this rank's next micro-batches to what the model's buffers hold; the results of each."""

    def forward_step(
        iterator: DataIterator, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        batch, output = _forward(iterator, model, keys, context, state.replay, training=True)
        scaled = partial(loss_function, config.loss, batch, num_microbatches, step_global_batch_size, loss)
        return output, state.mtp.with_loss(scaled, model, batch) if state.mtp else scaled

    with _explained_gradients(state.model):
        return _run_schedule(state, forward_step, data, num_microbatches, forward_only=False)


@contextmanager
def _explained_gradients(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Says in the first line what megatron-core's "found NaN in local grad norm for bucket #0" comes from.

    Raises:
        NotFinite: in place of megatron-core's error.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "in local grad norm for bucket" not in text:
            raise
        raise gradients_not_finite(named_params(model), text.splitlines()[0]) from error


def forget_gradients(state: TrainState) -> None:
    """Begins a step, of the adapter whose weights the model has."""
    if state.named:
        state.named.select_optimizer()
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()


def _update(
    config: BackendConfig,
    state: TrainState,
    step_global_batch_size: int,
    restore_biases: Callable[[], None],
) -> tuple[bool, float | None, int | None]:
    """Whether the optimizer has taken the step, the norm of its gradients and their zeros."""
    # The schedule of one adapter of several counts its steps, however many rollouts each has.
    progress = config.batches.global_batch_size if state.named else step_global_batch_size
    succeeded, grad_norm, num_zeros = state.optimizer.step()
    if succeeded:
        state.scheduler.step(increment=progress)
    elif refuses_nan(config.precision):
        raise RuntimeError(f"optimizer step refused, gradient norm {grad_norm}: wanted finite gradients")
    else:
        restore_biases()
    return succeeded, grad_norm, num_zeros


def _router_loss_weight(
    config: BackendConfig, data: DataIterator, num_microbatches: int, context: ParallelContext
) -> float:
    """See `router_losses`: 1, or the loss tokens of an average micro-batch if they are what divides it.

    The ranks of a context-parallel group count the same tokens, each for itself.
    """
    if not config.loss.calculate_per_token_loss or not config.model.num_experts:
        return 1.0
    tokens = torch.tensor(float(sum(map(counted_tokens, data.peek("loss_masks", num_microbatches)))))
    tokens = tokens.to(torch.cuda.current_device())
    dist.all_reduce(tokens, group=context.dp_group)
    # Every rank of a context-parallel group counts the tokens of whole sequences.
    return float(tokens) * context.cp_size / (num_microbatches * context.dp_size)
