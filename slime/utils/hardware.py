"""What can be told of this machine before torch is imported, which takes a second."""

import ctypes
import os
import sys

_CUDA_DRIVER = "libcuda.so.1"
"""The library without which no build of torch for CUDA finds a GPU."""
_ROCM_DEVICE = "/dev/kfd"


def has_gpu() -> bool:
    """Tells like `slime.utils.accelerator.has_gpu`, which is asked only where there may be one."""
    if "torch" not in sys.modules and not _may_have_gpu():
        return False
    from slime.utils import accelerator

    return accelerator.has_gpu()


def _may_have_gpu() -> bool:
    return os.path.exists(_ROCM_DEVICE) or _loads(_CUDA_DRIVER)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def can_fork_workers() -> bool:
    """Whether workers and engines may be forked from a process that has imported their libraries.

    Not where there is a GPU: libraries above CUDA may begin to use it when they are imported, and no process
    that does survives a fork.
    """
    return not has_gpu()
