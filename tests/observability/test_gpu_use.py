"""What a GPU's part of a step is held against, and how the row of a step shows it."""

import torch

from slime.observability.console import format_rollout_line
from slime.observability.gpu_use import device_peak, memory_metrics, peak_tflops
from slime.observability.train_metric_utils import perf_metrics
from slime.utils.accelerator import device_name, take_peak_memory
from tests.each import hold_each

# As drivers name them.
NAMES = {
    **{"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0, "NVIDIA H100 NVL": 835.5},
    **{"NVIDIA H200": 989.4, "NVIDIA H20": 148.0, "NVIDIA H20-3e": 148.0, "NVIDIA GH200 480GB": 989.4},
    **{"NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A10G": None, "NVIDIA A10": 125.0, "NVIDIA L40S": 362.0},
    **{"Tesla V100-SXM2-16GB": 125.0, "AMD Instinct MI300X": 1307.0, "NVIDIA GeForce RTX 2080": None},
}


def test_the_peak_of_a_gpu_is_found_by_its_name() -> None:
    def check(name: str) -> None:
        assert peak_tflops(name) == NAMES[name]

    hold_each(NAMES, check)


def test_mfu_is_the_part_of_the_peak_that_three_forward_passes_reach() -> None:
    """3 x 4e12 FLOP in 2 s on 2 GPUs are 3 TFLOP/s of each."""
    metrics = perf_metrics({"actor_train": 2.0}, 4e12, tokens=100, world_size=2, peak_tflops=12.0)
    assert metrics["perf/actor_train_mfu"] == 0.25
    assert "perf/actor_train_mfu" not in perf_metrics({"log_probs": 2.0}, 4e12, 100, 2, peak_tflops=12.0)


def test_a_cpu_has_neither_a_peak_nor_memory_of_its_own() -> None:
    cpu = torch.device("cpu")
    assert device_name(cpu) is None and device_peak(cpu) is None
    assert take_peak_memory(cpu) is None and memory_metrics(cpu) == {}


def test_a_row_shows_memory_and_mfu_where_there_is_a_gpu() -> None:
    row = {"train/loss": 0.25, "perf/step_time": 2.0}
    on_gpu = {
        "perf/memory_allocated_gib": 61.24,
        "perf/memory_reserved_gib": 70.0,
        "perf/actor_train_mfu": 0.4,
    }
    assert format_rollout_line(0, 15, row) == "rollout   1/15  loss 0.2500  | step 2.0s"
    shown = format_rollout_line(0, 15, row | on_gpu)
    assert shown == "rollout   1/15  loss 0.2500  | step 2.0s  | mem 61.2GiB  mfu 40%"
