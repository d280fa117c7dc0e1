"""The accelerator leaf: what differs between CUDA machines and machines without a GPU.

Everything else asks here instead of branching on the hardware.
"""

import os

import torch


def has_gpu() -> bool:
    """True where CUDA can be used."""
    return torch.cuda.is_available()


def process_group_backend() -> str:
    """The torch.distributed backend of the trainer: NCCL on GPUs, gloo elsewhere."""
    return "nccl" if has_gpu() else "gloo"


def local_device(local_rank: int = 0) -> torch.device:
    return torch.device("cuda", local_rank) if has_gpu() else torch.device("cpu")


def set_device(local_rank: int) -> torch.device:
    """Makes the GPU of this local rank current; on CPU it limits torch to the configured threads."""
    if has_gpu():
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return local_device(local_rank)


def synchronize() -> None:
    if has_gpu():
        torch.cuda.synchronize()


def empty_cache() -> None:
    if has_gpu():
        torch.cuda.empty_cache()
