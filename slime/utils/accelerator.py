"""The accelerator leaf: what differs between CUDA machines and machines without a GPU.

Everything else asks here instead of branching on the hardware.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from slime.utils.host_memory import HostMemory, host_memory

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_INT = 2**31 - 1


def has_gpu() -> bool:
    """True where CUDA can be used."""
    return torch.cuda.is_available()


def gpu_count() -> int:
    """GPUs that this process can use."""
    return torch.cuda.device_count() if has_gpu() else 0


def process_group_backend() -> str:
    """The torch.distributed backend of the trainer: NCCL on GPUs, gloo elsewhere."""
    return "nccl" if has_gpu() else "gloo"


def local_device(local_rank: int = 0) -> torch.device:
    return torch.device("cuda", local_rank) if has_gpu() else torch.device("cpu")


def set_device(local_rank: int) -> torch.device:
    """Makes the GPU of this local rank current; on CPU it limits torch to the configured threads.

    There it also makes freed memory stay with the process, as CUDA's allocator does (`empty_cache`).
    """
    if has_gpu():
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        _keep_freed_memory()
    return local_device(local_rank)


def synchronize(device: torch.device | None = None) -> None:
    """Returns when all that is queued on a device is done; by default on the current GPU, if there is one."""
    if has_gpu() if device is None else device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache() -> None:
    """Gives memory that no tensor uses back to the device; on CPU to the system, once that is short of it.

    On a GPU with it the workspaces that cuBLAS keeps between products, 32 MiB on an H100: they are allocated
    like tensors, so that the cache alone would never let go of them.

    On CPU engines find enough beside it until then. Pages that were given back are filled with zeros by the
    system before they are used again: a tenth of the time of a training step.
    """
    if has_gpu():
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and is_short(host_memory()):
        _libc("malloc_trim", 0)


def is_short(memory: HostMemory) -> bool:
    """Whether less than a quarter of the host's memory is left."""
    return memory.available < memory.total / 4


def _keep_freed_memory() -> None:
    """Have glibc reuse the memory of large tensors.

    By itself it asks the system for each tensor above 32 MB, and the system fills every page with zeros:
    a seventh of the CPU time of a training step with activations of that size.
    """
    if sys.platform == "linux":
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            _libc("mallopt", option, _LARGEST_INT)


def _libc(name: str, *arguments: int) -> None:
    """Calls a function of glibc; other C libraries lack it, and need it less."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies where this process computes."""
    return tensor.is_cuda or not has_gpu()


def host_buffer(num_bytes: int) -> torch.Tensor:
    """Host memory for copies from and to the device: [num_bytes] uint8, pinned beside a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_gpu())


def host_like(tensor: torch.Tensor, pinned: bool = True) -> torch.Tensor:
    """Makes a host tensor of this shape and dtype; pinned only if wanted."""
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned and has_gpu())


class CopyLane:
    """Copies between host and device, one after the other; on a GPU beside what is computed, if wanted."""

    def __init__(self, beside: bool) -> None:
        self._stream = torch.cuda.Stream() if beside and has_gpu() else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Copies what ``source`` will hold after all that is queued by now.

        Returns:
            What waits on the host until that is done.
        """
        if self._stream is None:
            target.copy_(source)
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event().synchronize

    def join(self) -> None:
        """What is queued on the device from now on sees the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


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


def free_memory(device: torch.device) -> int:
    """Bytes that a device has left, of a CPU those that the system or the container would give."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory().available


class PeakMemory(NamedTuple):
    """Bytes on a GPU: of tensors, and of what the allocator has taken for them."""

    allocated: int
    reserved: int


def take_peak_memory(device: torch.device) -> PeakMemory | None:
    """The most that there was at once since the last call; None without a GPU."""
    if device.type != "cuda":
        return None
    peak = PeakMemory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def device_name(device: torch.device) -> str | None:
    """The name that the driver gives a GPU; None without one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def gpu_memory() -> int | None:
    """Bytes of this machine's first GPU; None without one."""
    return int(torch.cuda.get_device_properties(0).total_memory) if has_gpu() else None
