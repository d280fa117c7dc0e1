"""Start of a trainer process: torch.distributed, megatron-core's process groups, random seeds."""

import os
import random
from argparse import Namespace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel

from slime.training.parallel import ParallelContext, set_current
from slime.utils.accelerator import process_group_backend, set_device
from slime.utils.distributed_utils import meeting_store
from slime.utils.http_utils import is_loopback
from slime.utils.misc import load_function


def init(args: Namespace) -> None:
    """Joins the process group that RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* describe; seeds everything.

    A process group that another caller has already initialised is used as it is.

    Raises:
        RuntimeError: the other ranks did not join in time; the message says which rank waited for how many.
    """
    # megatron-core overlaps communication by the order of launches, which one hardware queue preserves.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if getattr(args, "deterministic_mode", False):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be
        torch.use_deterministic_algorithms(True)
    set_device(int(os.environ.get("LOCAL_RANK", "0")))
    _init_process_group(args)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        distributed_timeout_minutes=_timeout_minutes(args),
    )
    set_current(_parallel_context(args))
    _set_seeds(args.seed)
    if getattr(args, "custom_megatron_init_path", None):
        load_function(args.custom_megatron_init_path)(args)


def _timeout_minutes(args: Namespace) -> int:
    return int(getattr(args, "distributed_timeout_minutes", None) or 10)


def _init_process_group(args: Namespace) -> None:
    if dist.is_initialized():
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    minutes = _timeout_minutes(args)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(minutes=minutes)
    if is_loopback(host):
        # Else gloo listens on the interface that the host's name leads to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            process_group_backend(),
            store=meeting_store(host, port, world_size, rank, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except dist.DistError as error:
        address = f"{host}:{port}"
        raise RuntimeError(
            f"trainer rank {rank} of {world_size}: no process group at {address} within {minutes} minutes"
        ) from error


def _set_seeds(seed: int) -> None:
    """Megatron-LM's rule: pipeline stages differ by 100, tensor-parallel ranks by the RNG tracker."""
    seed += 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _parallel_context(args: Namespace) -> ParallelContext:
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
        contiguous_cp=args.allgather_cp,
        is_last_stage=last,
        is_main=last and tp_rank == dp_rank == cp_rank == 0,
        pad_multiple=tp_size * getattr(args, "data_pad_size_multiplier", 1),
    )
