"""The memory of a tensor, for reads and writes of files."""

import ctypes

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU, which has to outlive them.

    Not by ``tensor.numpy()``: its storage could never be resized afterwards, as offloading weights does.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
