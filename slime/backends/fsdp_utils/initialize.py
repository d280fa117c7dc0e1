"""Start of a trainer process: torch.distributed, the mesh of all ranks, random seeds."""

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime.config.backend import BackendConfig
from slime.training.parallel import ParallelContext, set_current
from slime.utils import safe_checkpoint
from slime.utils.accelerator import set_device
from slime.utils.distributed_utils import bound_collectives, join_process_group


def init(config: BackendConfig) -> tuple[DeviceMesh, torch.device]:
    """Joins the process group that RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* describe; seeds everything.

    Returns:
        The mesh of all ranks, over which weights are sharded, and where this one computes.

    Raises:
        RuntimeError: the other ranks did not join in time.
    """
    if config.megatron.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be
        torch.use_deterministic_algorithms(True)
    device = set_device(int(os.environ.get("LOCAL_RANK", "0")))
    join_process_group(config.cluster.distributed_timeout_minutes)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shards",))
    set_current(_parallel_context(config, device))
    bound_collectives(config.cluster.distributed_timeout_minutes)
    safe_checkpoint.install()
    random.seed(config.trainer.seed)
    np.random.seed(config.trainer.seed)
    torch.manual_seed(config.trainer.seed)
    return mesh, device


def _parallel_context(config: BackendConfig, device: torch.device) -> ParallelContext:
    """Neighbouring ranks share sequences: rank = cp + CP * dp."""
    cp_size = config.parallelism.context_parallel_size
    sizes = dist.get_world_size() // cp_size, cp_size
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "cp"))
    dp_rank, cp_rank = (mesh.get_local_rank(name) for name in ("dp", "cp"))
    return ParallelContext(
        dp_group=mesh.get_group("dp"),
        dp_rank=dp_rank,
        dp_size=sizes[0],
        cp_group=mesh.get_group("cp") if cp_size > 1 else None,
        cp_rank=cp_rank,
        cp_size=cp_size,
        contiguous_cp=cp_size > 1 and config.parallelism.allgather_cp,
        is_main=dist.get_rank() == 0,
        pad_multiple=config.batches.data_pad_size_multiplier,
    )
