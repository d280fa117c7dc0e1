"""Random generators of a rank, as a checkpoint holds them."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject


def sharded_random_state(layout: Sequence[int]) -> ShardedObject:
    """Returns the generators of this rank, at its place in the layout; every rank keeps its own."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    position = (
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_data_parallel_rank(),
        *([mpu.get_context_parallel_rank()] if mpu.get_context_parallel_world_size() > 1 else []),
    )
    return ShardedObject("rng", state, tuple(layout), position)


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.cuda.set_rng_state(state["device"])
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
