"""Profiles of real optimizer steps on the CPU, and the history of a GPU's memory."""

import errno
import gzip
import json
from pathlib import Path

import pytest
import torch

from slime.config.profiling import ProfilingConfig
from slime.observability import profiling
from slime.observability.memory_history import MemoryHistory
from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3", num_hidden_layers=1)


def _train(rank, args, num_rollouts):
    worker = TrainWorker(args)
    worker.start()
    batch = split(args, random_rollout(256), worker.parallel_config())
    for rollout_id in range(num_rollouts):
        worker.train_shard(rollout_id, batch)


def profile(checkpoint, directory: Path, world_size: int = 1, **flags) -> dict[str, set[str]]:
    """The names of events in each trace of the second of three rollouts."""
    asked = {"use_pytorch_profiler": True, "profile_step_start": 1, "profile_step_end": 2}
    args = trainer_args(checkpoint, tensorboard_dir=str(directory), **asked, **flags)
    run_ranks(_train, world_size, args, 3)
    return {path.name: names_of(path) for path in directory.iterdir()}


def names_of(path: Path) -> set[str]:
    with gzip.open(path) as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}


def backward(names: set[str]) -> bool:
    return any("Backward" in name for name in names)


@pytest.mark.slow
def test_the_parts_of_a_rollout_get_a_trace_each(checkpoint, tmp_path) -> None:
    targets = {"profile_target": ["train_actor", "train_log_probs"], "use_rollout_entropy": True}
    traces = profile(checkpoint, tmp_path / "not" / "there", **targets)
    assert traces.keys() == {f"{target}_rank_0.1.pt.trace.json.gz" for target in targets["profile_target"]}
    steps, passes = (traces[f"{target}_rank_0.1.pt.trace.json.gz"] for target in targets["profile_target"])
    assert "aten::mm" in steps & passes
    assert backward(steps) and not backward(passes)
    assert any("train_one_step" in name for name in steps), "stacks of Python"


@pytest.mark.slow
def test_a_rank_alone_may_be_profiled_with_all_that_it_does(checkpoint, tmp_path) -> None:
    traces = profile(checkpoint, tmp_path, world_size=2, profile_ranks=[1], profile_target=["train_overall"])
    (name,) = traces
    assert name == "train_overall_rank_1.1.pt.trace.json.gz" and backward(traces[name])


def test_a_directory_that_cannot_be_made_is_named(checkpoint, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=rf"Error: .*: '{tmp_path}/file/x/train_overall_rank_0\.1"):
        profile(checkpoint, tmp_path / "file" / "x")


def test_a_trace_that_is_cut_off_is_no_trace(tmp_path, monkeypatch) -> None:
    class Profiler:
        """Writes what fits, as torch does on a full disk."""

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text('{"traceEvents": [{"name": "a')

    with pytest.raises(OSError, match="could not be written as a whole") as error:
        profiling._write(Profiler(), tmp_path / "a.json.gz")
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(tmp_path / "a.json.gz"))
    assert list(tmp_path.iterdir()) == []


class Recorder:
    """In the place of torch's record of a GPU's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[object] = []
        memory = torch.cuda.memory
        monkeypatch.setattr(memory, "_record_memory_history", lambda **how: self.calls.append(how))
        monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
        observe = "_cuda_attach_out_of_memory_observer"
        monkeypatch.setattr(torch._C, observe, self._attach, raising=False)

    def _attach(self, observer) -> None:
        self.out_of_memory = observer


def test_a_snapshot_is_written_after_so_many_rollouts_and_where_memory_runs_out(
    tmp_path, monkeypatch, caplog
) -> None:
    recorder = Recorder(monkeypatch)
    config = ProfilingConfig(
        record_memory_history=True, memory_snapshot_num_steps=2, memory_snapshot_dir=str(tmp_path / "a")
    )
    history = MemoryHistory(config, "memory_actor_rank_3")
    assert recorder.calls == [{"max_entries": 1_000_000, "stacks": "python"}]
    history.after(0)
    assert not (tmp_path / "a").exists()
    history.after(1)
    history.after(2)
    (snapshot,) = (tmp_path / "a").iterdir()
    assert snapshot.name.startswith("memory_actor_rank_3_") and snapshot.name.endswith("_snapshot.pickle")
    assert recorder.calls[1:] == [{"enabled": None}]
    snapshot.unlink()
    recorder.out_of_memory(0, 1, 2, 3)
    assert len([*(tmp_path / "a").iterdir()]) == 1


def test_a_snapshot_that_cannot_be_written_is_named_and_hides_no_lack_of_memory(
    tmp_path, monkeypatch, caplog
) -> None:
    recorder = Recorder(monkeypatch)
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "a")
    config = ProfilingConfig(
        record_memory_history=True, memory_snapshot_num_steps=1, memory_snapshot_dir=place
    )
    history = MemoryHistory(config, "memory_actor_rank_0")
    recorder.out_of_memory(0, 1, 2, 3)
    assert f"no snapshot of the memory: [Errno 20] Not a directory: '{place}/memory_actor" in caplog.text
    with pytest.raises(NotADirectoryError, match=f"{place}/memory_actor_rank_0_"):
        history.after(0)


def test_nothing_is_recorded_unless_it_is_asked_for(monkeypatch) -> None:
    recorder = Recorder(monkeypatch)
    MemoryHistory(ProfilingConfig(), "memory").after(0)
    assert recorder.calls == []
