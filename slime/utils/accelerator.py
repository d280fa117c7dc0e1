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


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies where this process computes."""
    return tensor.is_cuda or not has_gpu()


def host_buffer(num_bytes: int) -> torch.Tensor:
    """Host memory for copies from and to the device: [num_bytes] uint8, pinned beside a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_gpu())


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """The same for a tensor of this shape and dtype."""
    return torch.empty_like(tensor, device="cpu", pin_memory=has_gpu())


def collect_handles() -> None:
    """Frees device memory whose handles other processes have given up."""
    if has_gpu():
        torch.cuda.ipc_collect()


def has_packed_attention(query: torch.Tensor) -> bool:
    """Whether torch has a kernel for attention within the segments of a packed batch."""
    return query.is_cuda and query.dtype != torch.float32


def chunk_elements() -> int:
    """Elements at a time of work that can be cut: they stay in a CPU's cache, and keep a GPU busy."""
    return 1 << 25 if has_gpu() else 1 << 19
