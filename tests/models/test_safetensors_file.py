"""Writing a safetensors file tensor by tensor, and reading rows of it."""

import resource

import pytest
import torch
from safetensors.torch import load_file

from slime.models.checkpoint import safetensors_file
from slime.models.checkpoint.safetensors_file import SafetensorFile
from slime.models.checkpoint.tensor_slices import TensorSlices


def test_memory_that_is_written_and_read_can_still_be_offloaded(tmp_path):
    weight = torch.arange(12.0).view(3, 4)
    with SafetensorFile(tmp_path / "model.safetensors", {"weight": (weight.dtype, (3, 4))}) as file:
        file.write("weight", weight)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], weight)

    rows = torch.empty(2, 4)
    stored = TensorSlices(tmp_path / "model.safetensors")
    stored.copy(rows, "weight", weight.dtype, weight.shape, range(1, 3), [slice(None)])
    stored.close()
    assert torch.equal(rows, weight[1:])
    for tensor in (weight, rows):
        tensor.untyped_storage().resize_(0)  # a RuntimeError if numpy has seen it


def test_an_empty_tensor_is_written(tmp_path):
    path = tmp_path / "model.safetensors"
    with SafetensorFile(path, {"none": (torch.bfloat16, (0, 4)), "one": (torch.bfloat16, ())}) as file:
        file.write("none", torch.empty(0, 4, dtype=torch.bfloat16))
        file.write("one", torch.ones((), dtype=torch.bfloat16))
    found = load_file(path)
    assert found["none"].shape == (0, 4) and found["one"].item() == 1


@pytest.mark.parametrize("dtype", sorted(safetensors_file._NAMES, key=str))
def test_every_format_is_read_as_it_was_written(tmp_path, dtype):
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    with SafetensorFile(tmp_path / "model.safetensors", {"one": (dtype, (2, 3))}) as file:
        file.write("one", tensor)
    found = load_file(tmp_path / "model.safetensors")["one"]
    assert found.dtype == dtype and found.view(torch.uint8).equal(tensor.view(torch.uint8))


def test_a_format_that_is_not_written_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model.safetensors: one is torch.complex128, which is not written"):
        SafetensorFile(tmp_path / "model.safetensors", {"one": (torch.complex128, (2,))})


@pytest.mark.parametrize("room", [10, 1000])
def test_a_disk_without_room_is_told_by_the_name_of_the_file(tmp_path, room):
    """Not even a header is written in part and taken for whole."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "model.safetensors"
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            SafetensorFile(path, {"one": (torch.float32, (1000,))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
