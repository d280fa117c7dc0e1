"""The GPU that Ray assigned, as CUDA counts."""

import subprocess
import sys

import pytest
import ray

from slime.ray.local_gpu import local_gpu

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("assigned", "visible", "number"),
    [
        ([3], None, 3),
        (["5"], "4,5", 1),
        (["0"], "1, 0", 1),
        ([1], "", 1),
        ([], "4,5", 0),
    ],
)
def test_the_number_is_a_place_in_what_the_process_sees(assigned, visible, number, monkeypatch):
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: assigned)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpu() == number


def test_amd_has_a_list_of_its_own(monkeypatch):
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [7])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "6,7")
    assert local_gpu() == 1


_ASK = """
import os
import ray
from slime.ray.local_gpu import local_gpu
from slime.ray.local_start import start_ray
from slime.ray.node import process_env, runtime_env, share_environment

share_environment()
options = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False, "logging_level": "error"}
start_ray(300.0, lambda: ray.init(address="local", **options))

class Rank:
    def number(self):
        return local_gpu(), os.environ["CUDA_VISIBLE_DEVICES"]

spawn = ray.remote(Rank).options(num_gpus=1, runtime_env=runtime_env(process_env(trainer=True)))
ranks = [spawn.remote() for _ in range(2)]
print(sorted(ray.get([rank.number.remote() for rank in ranks])))
"""


@pytest.mark.cluster
def test_ranks_of_a_node_that_shows_some_gpus_count_those(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    found = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=600)
    assert found.stdout.splitlines()[-1:] == ["[(0, '4,5'), (1, '4,5')]"], found.stderr
