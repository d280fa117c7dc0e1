"""Start of a trainer process: torch.distributed, one mesh of data-parallel ranks, random seeds."""

import os
import random
from argparse import Namespace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime.training.parallel import ParallelContext, set_current
from slime.utils import safe_checkpoint
from slime.utils.accelerator import set_device
from slime.utils.distributed_utils import join_process_group


def init(args: Namespace) -> tuple[DeviceMesh, torch.device]:
    """Joins the process group that RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* describe; seeds everything.

    Returns:
        The mesh of all ranks, and where this one computes.

    Raises:
        RuntimeError: the other ranks did not join in time.
    """
    if getattr(args, "deterministic_mode", False):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be
        torch.use_deterministic_algorithms(True)
    device = set_device(int(os.environ.get("LOCAL_RANK", "0")))
    join_process_group(getattr(args, "distributed_timeout_minutes", None) or 10)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    set_current(_parallel_context(mesh, getattr(args, "data_pad_size_multiplier", 1)))
    safe_checkpoint.install()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    return mesh, device


def _parallel_context(mesh: DeviceMesh, pad_multiple: int) -> ParallelContext:
    rank = mesh.get_local_rank()
    return ParallelContext(
        dp_group=mesh.get_group(),
        dp_rank=rank,
        dp_size=mesh.size(),
        is_main=rank == 0,
        pad_multiple=pad_multiple,
    )
