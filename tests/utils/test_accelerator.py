"""What the accelerator leaf does on machines without a GPU."""

import subprocess
import sys

import pytest
import torch

from slime.utils import accelerator

_FAULTS = """
import resource
import torch
from slime.utils import accelerator
from slime.utils.accelerator import empty_cache, set_device
from slime.utils.host_memory import HostMemory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

set_device(0)
def use_and_free():
    for _ in range(12):
        torch.ones(1 << 24)  # 64 MiB

use_and_free()
before = faults()
use_and_free()
again, held = faults() - before, resident()
accelerator.host_memory = lambda: HostMemory(4000, 1001)
empty_cache()
kept = held - resident()
accelerator.host_memory = lambda: HostMemory(4000, 999)
empty_cache()
print(again, kept, held - resident())
"""


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="of glibc, without a GPU")
def test_freed_memory_of_large_tensors_is_used_again_until_the_host_is_short_of_it() -> None:
    printed = subprocess.run([sys.executable, "-c", _FAULTS], check=True, capture_output=True, text=True)
    again, given_back_early, given_back = map(int, printed.stdout.split())
    pages = (1 << 26) // 4096
    assert again < pages / 4, "each tensor asks the system for its pages"
    assert given_back_early < 1 << 22
    assert given_back > 1 << 25


def test_a_gpu_gets_the_workspaces_of_cublas_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(accelerator, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("cache"))
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: called.append("workspaces"), raising=False)
    accelerator.empty_cache()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    accelerator.empty_cache()
    assert called == ["cache", "workspaces", "cache"]


def test_waiting_for_a_device_waits_for_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for gpu in (False, True):
        monkeypatch.setattr(accelerator, "has_gpu", lambda gpu=gpu: gpu)
        accelerator.synchronize()
        accelerator.synchronize(torch.device("cpu"))
        accelerator.synchronize(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1), None, torch.device("cuda", 1)]
