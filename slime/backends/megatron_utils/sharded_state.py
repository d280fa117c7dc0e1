"""What checkpoints hold of a model and its optimizer, and the way back into them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy
from megatron.core.utils import unwrap_model

from slime.adapters.targets import is_of_adapter
from slime.backends.megatron_utils.foreign_checkpoint import under_one_name
from slime.backends.megatron_utils.lora_checkpoint import (
    adapter_state,
    kept_adapters,
    load_adapter_state,
)
from slime.backends.megatron_utils.mtp_checkpoint import kept_mtp
from slime.backends.megatron_utils.optimizer import ensure_optimizer_states
from slime.backends.megatron_utils.random_state import sharded_random_state
from slime.backends.megatron_utils.resume import load_optimizer, load_schedule
from slime.backends.megatron_utils.step import TrainState
from slime.backends.megatron_utils.value_head import kept_head
from slime.config.backend import BackendConfig
from slime.config.checkpoints import CheckpointConfig
from slime.training.checkpoint_errors import explained

# The only kind of optimizer sharding that megatron-core 0.16 can load into another layout.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}

_NUMBERED = {"non_homogeneous_layers": True}


def model_state(state: TrainState, naming: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The sharded weights of the model without adapters; of several chunks under their numbers.

    Args:
        naming: how a checkpoint names layers, if not as this trainer does.
    """
    metadata, chunks = {**METADATA, **(naming or {})}, unwrap_model(state.model)
    with under_one_name(chunks, naming or {}):
        states = [chunk.sharded_state_dict(metadata=metadata) for chunk in chunks]
    weights = [{n: value for n, value in each.items() if not is_of_adapter(n)} for each in states]
    return weights[0] if len(weights) == 1 else {str(i): chunk for i, chunk in enumerate(weights)}


def trained_state(state: TrainState, naming: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a checkpoint holds of the model: the adapters alone where nothing else trains."""
    return {**adapter_state(state.model)} if state.adapts else model_state(state, naming)


def sharded_state(
    config: CheckpointConfig,
    state: TrainState,
    *,
    with_optimizer: bool | None = None,
    with_rng: bool | None = None,
    loading: bool = False,
    numbered: bool = False,
) -> dict[str, Any]:
    """What a checkpoint holds beside plain values, as ``config`` says where it is not said here.

    Args:
        numbered: whether the optimizer's state names each layer, as it must where it has not all.
    """
    if with_optimizer is None:
        with_optimizer = not config.no_save_optim
    if with_rng is None:
        with_rng = not config.no_save_rng
    content: dict[str, Any] = {"model": trained_state(state)}
    if with_optimizer:
        ensure_optimizer_states(state.optimizer)
        weights = trained_state(state, _NUMBERED) if numbered else content["model"]
        content["optimizer"] = state.optimizer.sharded_state_dict(
            weights, is_loading=loading, metadata=METADATA
        )
        content["scheduler"] = state.scheduler.state_dict()
    if with_rng:
        content["rng"] = sharded_random_state(layout())
    return content


def read_state(
    template: dict[str, Any], path: str | Path, common: LoadCommonStrategy | None = None
) -> dict[str, Any]:
    """Reads what a template asks for.

    Raises:
        CheckpointError: it cannot be read.
    """
    with explained(path, "read", "a complete copy, or another iteration with --ckpt-step"):
        return dist_checkpointing.load(template, str(path), common_strategy=common)


def take(
    config: BackendConfig,
    state: TrainState,
    loaded: Mapping[str, Any],
    schedule: Mapping[str, Any] | None,
    root: str | Path,
) -> None:
    """Fills what trains, and optimizer and schedule.

    Args:
        schedule: as it was saved; None leaves optimizer and schedule to begin anew.
    """
    load_trained_state(state, loaded["model"])
    if schedule is not None:
        load_optimizer(config.schedule, state, loaded["optimizer"])
        load_schedule(state, dict(schedule), root)
    else:
        state.optimizer.reload_model_params()


def load_trained_state(state: TrainState, weights: dict[str, Any]) -> None:
    """Fills what trains with what was read for a `trained_state`."""
    if state.adapts:
        load_adapter_state(state.model, weights)
    else:
        load_model(state, weights)


def load_model(state: TrainState, weights: dict[str, Any]) -> None:
    """Fills the model with what was read for a `model_state`."""
    chunks = unwrap_model(state.model)
    for i, chunk in enumerate(chunks):
        kept = {**kept_head(chunk), **kept_mtp(chunk), **kept_adapters(chunk)}
        chunk.load_state_dict({**kept, **(weights if len(chunks) == 1 else weights[str(i)])})


def layout() -> list[int]:
    """Sizes of the parallel groups, which random state is of."""
    return [
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_data_parallel_world_size(),
        *([cp] if (cp := mpu.get_context_parallel_world_size()) > 1 else []),
    ]
