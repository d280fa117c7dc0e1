"""Start of a trainer process: torch.distributed, megatron-core's process groups, random seeds."""

import os
import random

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from slime.config.backend import BackendConfig
from slime.training.parallel import ParallelContext, set_current
from slime.utils.accelerator import set_device
from slime.utils.distributed_utils import bound_collectives, join_process_group
from slime.utils.misc import load_function


def init(config: BackendConfig) -> None:
    """Joins the process group that RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* describe; seeds everything.

    A process group that another caller has already initialised is used as it is.

    Raises:
        RuntimeError: the other ranks did not join in time; the message says which rank waited for how many.
    """
    # megatron-core overlaps communication by the order of launches, which one hardware queue preserves.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if config.megatron.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be
        torch.use_deterministic_algorithms(True)
    set_device(int(os.environ.get("LOCAL_RANK", "0")))
    join_process_group(config.cluster.distributed_timeout_minutes)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.parallelism.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.parallelism.context_parallel_size,
        expert_model_parallel_size=config.experts.expert_model_parallel_size,
        expert_tensor_parallel_size=config.experts.expert_tensor_parallel_size,
        distributed_timeout_minutes=config.cluster.distributed_timeout_minutes,
    )
    bound_collectives(config.cluster.distributed_timeout_minutes)
    set_current(_parallel_context(config))
    _set_seeds(config.trainer.seed)
    if config.hooks.custom_megatron_init_path:
        load_function(config.hooks.custom_megatron_init_path)(config.flat)


def is_megatron_main_rank() -> bool:
    """Whether this process is the one that logs: the first rank of the last pipeline stage."""
    return ParallelContext.current().is_main


def _set_seeds(seed: int) -> None:
    """Megatron-LM's rule: pipeline stages differ by 100, tensor-parallel ranks by the RNG tracker."""
    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _parallel_context(config: BackendConfig) -> ParallelContext:
    tp_size, dp_size = mpu.get_tensor_model_parallel_world_size(), mpu.get_data_parallel_world_size()
    tp_rank, dp_rank = mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank()
    cp_size, cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    last = mpu.is_pipeline_last_stage()
    return ParallelContext(
        tp_group=mpu.get_tensor_model_parallel_group() if tp_size > 1 else None,
        # Always a group: torch.distributed takes None for all ranks.
        dp_group=mpu.get_data_parallel_group(),
        tp_rank=tp_rank,
        dp_rank=dp_rank,
        dp_size=dp_size,
        cp_group=mpu.get_context_parallel_group() if cp_size > 1 else None,
        cp_rank=cp_rank,
        cp_size=cp_size,
        contiguous_cp=config.parallelism.allgather_cp,
        is_last_stage=last,
        is_main=last and tp_rank == dp_rank == cp_rank == 0,
        pad_multiple=tp_size * config.batches.data_pad_size_multiplier,
    )
