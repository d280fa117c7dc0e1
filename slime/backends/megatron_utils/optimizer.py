"""The distributed optimizer and its schedule, from flags, and which of its steps are skipped."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.backends.megatron_utils import fused_adam
from slime.backends.megatron_utils.moment_storage import MomentStorage
from slime.backends.megatron_utils.update_rules import Adam, Sgd, StatelessAdam, UpdateRule
from slime.config.backend import BackendConfig
from slime.config.optimization import OptimizationConfig
from slime.config.precision import PrecisionConfig
from slime.config.run import values_of
from slime.training.optimizer_schedule import schedule_settings


def ddp_config(config: BackendConfig) -> DistributedDataParallelConfig:
    """Gradient buffers and their reduction."""
    values = _stated_fields(DistributedDataParallelConfig, config)
    values.update(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=_reduces_in_float32(config.precision),
        check_for_nan_in_grad=refuses_nan(config.precision),
    )
    return DistributedDataParallelConfig(**values)


def refuses_nan(config: PrecisionConfig) -> bool:
    """Whether NaN or Inf in the gradients ends the run; else the step is skipped, as in float16 always."""
    return not (config.no_check_for_nan_in_loss_and_grad or config.fp16)


def _reduces_in_float32(config: PrecisionConfig) -> bool:
    """Megatron-LM's rule: bfloat16 gradients are summed in float32 unless told otherwise."""
    return config.accumulate_allreduce_grads_in_fp32 or (config.bf16 and not config.grad_reduce_in_bf16)


# What `FusedAdam` does in megatron-core's stead, which would need TransformerEngine for it.
_OURS = (
    *("optimizer_cpu_offload", "use_precision_aware_optimizer"),
    *("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype"),
)
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def optimizer_config(config: BackendConfig) -> OptimizerConfig:
    values = _stated_fields(OptimizerConfig, config)
    for name in _OURS:
        values.pop(name, None)
    values.update(
        optimizer="adam",  # whatever the rule: the distributed optimizer shards no other class
        use_distributed_optimizer=True,
        params_dtype=config.precision.params_dtype,
        bf16=config.precision.bf16,
        fp16=config.precision.fp16,
    )
    return OptimizerConfig(**values)


def _stated_fields(config_class: type, config: BackendConfig) -> dict[str, Any]:
    """The fields of a dataclass of megatron-core's that are flags, and have a value."""
    given = values_of(config)
    names = [field.name for field in fields(config_class) if field.init]
    return {name: given[name] for name in names if given.get(name) is not None}


def build_optimizer(config: BackendConfig, model: Sequence[torch.nn.Module]) -> MegatronOptimizer:
    """The optimizer, its state sharded over the data-parallel ranks; norms and biases do not decay."""
    settings, rule, storage = optimizer_config(config), update_rule(config), moment_storage(config)
    plain = isinstance(rule, Adam) and storage == MomentStorage()
    if not plain:
        fused_adam.install(instead_of_any=True)
    optimizer = get_megatron_optimizer(
        settings, list(model), config_overrides=get_standard_config_overrides(settings)
    )
    for part in real_parts(optimizer):
        _save_buckets_where_they_lie(part)
        if not plain:
            part.optimizer.arrange(rule, storage)
            part.init_state_fn = lambda optimizer, _=None: optimizer.initialize_states()
            _save_as_float32(part)
    share_loss_scale(optimizer)
    if not (refuses_nan(config.precision) or config.precision.fp16):
        skip_not_finite(optimizer)
    return optimizer


def update_rule(config: BackendConfig) -> UpdateRule:
    """What a step does (``--optimizer``, ``--use-stateless-adam``)."""
    decoupled, optimizer = config.megatron.decoupled_weight_decay, config.optimizer
    if optimizer.optimizer == "sgd":
        return Sgd(optimizer.sgd_momentum)
    return StatelessAdam(decoupled) if optimizer.use_stateless_adam else Adam(decoupled)


def moment_storage(config: BackendConfig) -> MomentStorage:
    """Returns where and how moments are kept (``--optimizer-cpu-offload``, ``--exp-avg-dtype`` and their
    kin).
    """
    state, formats = config.optimizer_state, {}
    if state.use_precision_aware_optimizer:
        given = {"exp_avg": state.exp_avg_dtype, "exp_avg_sq": state.exp_avg_sq_dtype}
        formats = {name: _FORMATS[dtype] for name, dtype in given.items() if dtype != "fp32"}
    if not state.optimizer_cpu_offload:
        return MomentStorage(formats)
    return MomentStorage(
        formats,
        host_fraction=state.optimizer_offload_fraction,
        overlap=state.overlap_cpu_optimizer_d2h_h2d,
        pin_params=not state.no_pin_cpu_params,
        pin_grads=not state.no_pin_cpu_grads,
    )


def _save_as_float32(part: Any) -> None:
    """Lets checkpoints hold Adam's moments in float32, zero where there are none: so megatron-core has it."""
    read = part._get_main_param_and_optimizer_states

    def read_wide(model_param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        tensors = read(model_param)
        param = tensors["param"]
        moments = {name: tensors.get(name) for name in Adam().moments}
        wide = {n: torch.zeros_like(param) if t is None else t.float() for n, t in moments.items()}
        return {"param": param, **wide}

    part._get_main_param_and_optimizer_states = read_wide


def _save_buckets_where_they_lie(part: Any) -> None:
    """Lets checkpoints hold right values where gradients are reduced in several buckets.

    megatron-core 0.16 gathers the values of a buffer without what pads its buckets, and then looks for those
    of a parameter where it is in the padded buffer.
    """
    gather = part.get_parameter_state_dp_zero

    def gathered(*args: Any, **options: Any) -> Any:
        state = gather(*args, **options)
        for number, buffer in enumerate(part.buffers if state else ()):
            for tensors in state[number].values():
                dense = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
                tensors.update({name: _padded(value, buffer) for name, value in dense.items()})
        return state

    part.get_parameter_state_dp_zero = gathered


def _padded(values: torch.Tensor, buffer: Any) -> torch.Tensor:
    """A buffer's values, each bucket where it lies in the buffer, of buckets without what pads them."""
    result, start = values.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        result[bucket.offset : bucket.offset + bucket.numel_unpadded] = values[start:end]
        start = end
    return result


def build_scheduler(config: OptimizationConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate and weight decay over the run."""
    return OptimizerParamScheduler(optimizer, **vars(schedule_settings(config)))


def ensure_optimizer_states(optimizer: MegatronOptimizer) -> None:
    """Moments of zero where no step has made any, as while float16 still looks for its loss scale."""
    for part in _parts(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)


@torch.no_grad()
def reset_optimizer_states(optimizer: MegatronOptimizer) -> None:
    """Zeroes the moments and the step count (``--reset-optimizer-states``)."""
    for part in real_parts(optimizer):
        torch_optimizer = part.optimizer
        for state in torch_optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        for group in torch_optimizer.param_groups:
            if "step" in group:
                group["step"] = 0


def _parts(optimizer: MegatronOptimizer) -> Sequence[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def real_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Lists what has a torch optimizer: a rank without parameters of some kind has none for them."""
    return [part for part in _parts(optimizer) if part.optimizer is not None]


def share_loss_scale(optimizer: MegatronOptimizer) -> None:
    """One loss scale of float16 for the weights of experts and all others.

    megatron-core 0.16 gives each of its optimizers a scale that falls when that optimizer's own gradients
    overflow. But the loss is multiplied by the first one's alone, so the gradients of the others would be
    divided by another factor from the first overflow on that not all of them share.
    """
    parts = [part for part in getattr(optimizer, "chained_optimizers", ()) if part.grad_scaler is not None]
    if len(parts) < 2:
        return
    scaler, prepare = parts[0].grad_scaler, optimizer.prepare_grads
    update = scaler.update

    def prepared() -> bool:
        overflow = prepare()
        update(overflow)
        return overflow

    vars(scaler)["update"] = lambda found_inf: None  # each part would, after its own gradients
    for part in parts:
        part.grad_scaler = scaler
    vars(optimizer)["prepare_grads"] = prepared


def skip_not_finite(optimizer: MegatronOptimizer) -> None:
    """Skips steps with NaN or infinity in their gradients, which megatron-core takes without a loss scale."""
    prepare = optimizer.prepare_grads

    def prepared() -> bool:
        return prepare() or not math.isfinite(float(optimizer.get_grad_norm()))

    vars(optimizer)["prepare_grads"] = prepared
