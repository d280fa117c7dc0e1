"""Writing a safetensors file tensor by tensor, and reading rows of it."""

import torch
from safetensors.torch import load_file

from slime.models.safetensors_file import SafetensorFile
from slime.models.stored_rows import StoredRows


def test_memory_that_is_written_and_read_can_still_be_offloaded(tmp_path):
    weight = torch.arange(12.0).view(3, 4)
    with SafetensorFile(tmp_path / "model.safetensors", {"weight": (weight.dtype, (3, 4))}) as file:
        file.write("weight", weight)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], weight)

    rows = torch.empty(2, 4)
    stored = StoredRows(tmp_path / "model.safetensors")
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
