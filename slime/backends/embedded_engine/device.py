"""The device of the engine."""

import torch

from slime.utils.accelerator import gpu_count


def engine_device(name: str | None, gpu: int) -> torch.device:
    """Returns the device of ``--device`` and ``--base-gpu-id``; by default a GPU if there is one.

    Raises:
        ValueError: there is no such GPU.
    """
    count = gpu_count()
    if name == "cpu" or (name is None and not count):
        return torch.device("cpu")
    if not count:
        raise ValueError("--device cuda: no GPU is visible to this process (wanted: cpu, or leave it out)")
    if gpu >= count:
        raise ValueError(f"--base-gpu-id {gpu}: this machine has {count} GPUs (wanted: 0 to {count - 1})")
    return torch.device("cuda", gpu)
