"""How much of a GPU a step uses: its memory, and the part of its peak that the model's products reach."""

import torch
import torch.distributed as dist

from slime.utils.accelerator import device_name, take_peak_memory

_GIB = 2**30

PEAK_TFLOPS = {
    **{"GB300": 2500.0, "GB200": 2500.0, "B300": 2250.0, "B200": 2250.0},
    **{"H200 NVL": 835.5, "H200": 989.4, "GH200": 989.4, "H20": 148.0},
    **{"H100 PCIe": 756.0, "H100 NVL": 835.5, "H100": 989.4, "H800": 989.4},
    **{"A100": 312.0, "A800": 312.0, "A40": 149.7, "A30": 165.0, "A10": 125.0},
    **{"L40S": 362.0, "L40": 181.0, "L20": 119.5, "L4": 121.0, "V100": 125.0, "T4": 65.0},
    **{"MI355X": 2500.0, "MI325X": 1307.0, "MI300X": 1307.0},
}
"""TFLOP/s of dense products in 16 bits, by words in the name that the driver gives; the first that match."""


def peak_tflops(name: str) -> float | None:
    """The peak of a GPU as its data sheet gives it; None of one that is not in the table."""
    words = f" {name.replace('-', ' ')} "
    return next((peak for known, peak in PEAK_TFLOPS.items() if f" {known} " in words), None)


def device_peak(device: torch.device) -> float | None:
    """The peak of the device that computes; None without a GPU, or of an unknown one."""
    name = device_name(device)
    return None if name is None else peak_tflops(name)


def memory_metrics(device: torch.device, prefix: str = "") -> dict[str, float]:
    """What the fullest GPU of a role held at most since the last call; nothing without GPUs.

    All ranks of the role call it.

    Args:
        prefix: of the role's metrics.
    """
    peak = take_peak_memory(device)
    if peak is None:
        return {}
    most = torch.tensor([peak.allocated, peak.reserved], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    allocated, reserved = most.tolist()
    return {
        f"perf/{prefix}memory_allocated_gib": allocated / _GIB,
        f"perf/{prefix}memory_reserved_gib": reserved / _GIB,
    }
