"""numpy's types in torch's files are read, and nothing else is run or made."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.utils.numpy_data import load_plain

VALUES = [
    *(np.float64(0.5), np.int32(-3), np.bool_(True), np.str_("aé"), np.float16(1.5)),
    *(
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.array([], dtype=np.float32),
        np.asfortranarray(np.eye(2)),
    ),
    *(np.array(["a", "bc"]), np.array([{"x": np.int8(1)}, [2]], dtype=object), np.datetime64("2024-01-02")),
    *([np.array([1.0])], {"k": np.array([True])}, torch.ones(2), "text", 1, None),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{value!r:.25}")
def test_what_numpy_wrote_is_read_as_python_s_and_torch_s(tmp_path: Path, value: Any) -> None:
    torch.save({"value": value}, tmp_path / "a.pt")
    found = load_plain(tmp_path / "a.pt")["value"]
    assert not isinstance(found, np.generic | np.ndarray)
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OU":
        assert isinstance(found, torch.Tensor) and np.array_equal(found.numpy(), value)
    elif isinstance(value, np.ndarray | np.generic):
        assert found == value.tolist()


class Runs:
    """Would make a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_an_object_of_another_kind_is_refused_and_not_made(tmp_path: Path) -> None:
    inside = np.array([Runs(tmp_path / "made")], dtype=object)
    for value in (Runs(tmp_path / "made"), inside):
        torch.save({"value": value}, tmp_path / "a.pt")
        with pytest.raises(pickle.UnpicklingError, match=r"mkdir"):
            load_plain(tmp_path / "a.pt")
    assert not (tmp_path / "made").exists()


def test_a_file_that_needs_no_numpy_does_not_allow_it_for_others(tmp_path: Path) -> None:
    torch.save({"value": np.float64(1)}, tmp_path / "a.pt")
    load_plain(tmp_path / "a.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "a.pt", weights_only=True)
