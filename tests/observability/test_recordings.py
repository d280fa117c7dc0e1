"""Recorded rollouts are found again, under the name that their template gives and with what was in them."""

import threading
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from slime.observability.rollout_data_utils import (
    load_debug_rollout_data,
    read_recording,
    save_debug_rollout_data,
)
from slime.rollout.forge_load import generate_rollout as replay
from slime.utils.types import Sample
from tests.run_args import run_args


@pytest.mark.parametrize(
    ("template", "files"),
    [("{rollout_id}.pt", {"3.pt", "eval_3.pt"}), ("{rollout_id:05d}.pt", {"00003.pt", "eval_00003.pt"})],
)
def test_a_width_in_the_name_holds_for_rollouts_and_evaluations(tmp_path, template, files):
    path = f"{tmp_path}/{template}"
    save_debug_rollout_data(path, [Sample(prompt="a")], rollout_id=3, evaluation=False)
    save_debug_rollout_data(path, [Sample(prompt="b")], rollout_id=3, evaluation=True)
    assert {file.name for file in tmp_path.iterdir()} == files
    assert load_debug_rollout_data(path, rollout_id=3)[0].prompt == "a"


class Verdict(Enum):
    RIGHT = "right"


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        (Verdict.RIGHT, r"\S+test_recordings\.Verdict"),
        (threading.Lock(), "_thread.lock"),
        (range(2), "range"),
    ],
)
@pytest.mark.parametrize(
    ("values", "place"),
    [
        (lambda odd: {"metadata": {"tries": [{"verdict": odd}]}}, r"metadata\['tries'\]\[0\]\['verdict'\]"),
        (lambda odd: {"label": odd}, "label"),
    ],
)
def test_what_would_not_come_back_is_refused_when_it_is_written(tmp_path, odd, found, values, place):
    path = f"{tmp_path}/{{rollout_id}}.pt"
    samples = [Sample(index=4, group_index=2), Sample(index=5, group_index=2, **values(odd))]
    named = rf"--save-debug-rollout-data \S+/3\.pt: sample 5 of group 2: {place} is {found}, which no"
    with pytest.raises(ValueError, match=named):
        save_debug_rollout_data(path, samples, rollout_id=3, evaluation=False)
    assert not list(tmp_path.iterdir())


def test_samples_that_would_come_back_one_by_one_are_told_why_they_do_not_together(tmp_path):
    """torch writes no two views of the same memory with different types."""
    path = f"{tmp_path}/{{rollout_id}}.pt"
    whole = torch.arange(4, dtype=torch.int32)
    parts = [{"a": whole}, {"b": whole.view(torch.float32)}]
    apart = [Sample(index=i, metadata=part) for i, part in enumerate(parts)]
    why = (
        r"with entries that do not go together \(Cannot save multiple tensors .* different types\), which no"
    )
    named = rf"--save-debug-rollout-data \S+/3\.pt: samples is list {why}"
    with pytest.raises(ValueError, match=named):
        save_debug_rollout_data(path, apart, rollout_id=3, evaluation=False)
    one = Sample(index=7, group_index=2, metadata=parts[0] | parts[1])
    with pytest.raises(ValueError, match=rf"sample 7 of group 2: metadata is dict {why}"):
        save_debug_rollout_data(path, [one], rollout_id=3, evaluation=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"rollout_id": 0}, "KeyError: 'samples'"),
        ({"samples": [{"status": "lost"}]}, "ValueError: 'lost' is not a valid SampleStatus"),
        ({"samples": [{"status": Verdict.RIGHT}]}, r"UnpicklingError: Unsupported global: GLOBAL \S+Verdict"),
        (b"no such file", ""),
    ],
)
def test_a_recording_of_another_version_is_named(tmp_path, content, why):
    path = tmp_path / "0.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    template, said = f"{tmp_path}/{{rollout_id}}.pt", rf"{path}: is not a readable recording: .*{why}"
    with pytest.raises(ValueError, match=f"--load-debug-rollout-data {said}"):
        load_debug_rollout_data(template, rollout_id=0)
    with pytest.raises(ValueError, match=f"--load-forge-rollout-data {said}"):
        replay(run_args(load_forge_rollout_data=template), 0, None)


def test_plain_metadata_and_tensors_come_back(tmp_path):
    path = f"{tmp_path}/{{rollout_id}}.pt"
    metadata = {"plain": [1, (2.5, None), {"a": {True}}, b"b"], "tensor": torch.arange(3)}
    save_debug_rollout_data(path, [Sample(metadata=metadata)], rollout_id=0, evaluation=False)
    (sample,) = load_debug_rollout_data(path, rollout_id=0)
    assert sample.metadata["plain"] == metadata["plain"]
    assert sample.metadata["tensor"].tolist() == [0, 1, 2]


def test_an_error_of_the_disk_is_not_blamed_on_the_samples(tmp_path, monkeypatch):
    save = torch.save

    def save_in_memory_only(data, file):
        if isinstance(file, Path):
            raise RuntimeError("no space left")
        save(data, file)

    monkeypatch.setattr("torch.save", save_in_memory_only)
    path = f"{tmp_path}/{{rollout_id}}.pt"
    with pytest.raises(RuntimeError, match="no space left"):
        save_debug_rollout_data(path, [Sample()], rollout_id=0, evaluation=False)


def test_a_recording_with_numpy_s_types_is_read(tmp_path):
    """As the original writes them, of data that came out of a parquet file."""
    sample = {
        "tokens": np.array([1, 2]),
        "label": np.str_("4"),
        "status": "completed",
        "reward": np.float32(1),
    }
    torch.save({"rollout_id": 0, "samples": [sample | {"metadata": {"n": np.int64(3)}}]}, tmp_path / "0.pt")
    (found,) = read_recording(tmp_path / "0.pt", "--load-debug-rollout-data")
    assert (found.label, found.reward, found.metadata) == ("4", 1.0, {"n": 3})
    assert found.status is Sample.Status.COMPLETED and list(found.tokens) == [1, 2]
