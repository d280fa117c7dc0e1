"""The GPU that Ray assigned, as CUDA counts."""

import pytest
import ray

from slime.ray.local_gpu import local_gpu


@pytest.mark.parametrize(
    ("assigned", "visible", "number"),
    [
        ([3], None, 3),
        (["5"], "4,5", 1),
        (["0"], "1, 0", 1),
        (["GPU-b"], "GPU-a,GPU-b", 1),
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
