"""The merged directory holds the weights that two ranks have saved.

One is merged by the command as it is called; the others' processes are forked, without seconds of imports.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.ray.train_worker import TrainWorker
from tests.backends.fsdp_harness import fsdp_args, weights_of
from tests.forking import ForkedScript
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.page_runs import printed
from tests.trainer_batches import random_rollout, split

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def _save_at_once(rank, args):
    worker = TrainWorker(args)
    worker.start()
    worker.save_model(3)


def _save(rank, args, rollout):
    worker = TrainWorker(args)
    worker.start()
    worker.train_shard(0, split(args, rollout, worker.parallel_config()))
    worker.save_model(7)
    return weights_of(worker)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where two ranks have saved iteration 7, the model it began with, and the weights."""
    root = tmp_path_factory.mktemp("run")
    origin = save_tiny_hf(root / "origin", "qwen3")
    (root / "origin" / "tokenizer.json").write_text("{}")
    args = fsdp_args(origin, save=str(root / "saved"))
    return root / "saved", origin, run_ranks(_save, 2, args, random_rollout(256))[0]


def called(*words):
    """Exit status, and what it said on standard error."""
    command = [sys.executable, "tools/convert_fsdp_to_hf.py", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stderr


def forked(log, *words):
    """Runs the converter in a forked process; ``log`` is a file for it."""
    status = ForkedScript(ROOT / "tools/convert_fsdp_to_hf.py", [*map(str, words)], log, cwd=ROOT).wait(600)
    return status, log.read_text()


def test_a_checkpoint_becomes_a_hugging_face_directory(saved, tmp_path):
    source, origin, weights = saved
    out = tmp_path / "out"
    (command,) = printed("python tools/convert_fsdp_to_hf.py")
    _, _, *words = command.words
    here = {"/runs/a/iter_0000007": source / "iter_0000007", "/models/a": out}
    status, said = called(*(here.get(word, origin if word.startswith("/models") else word) for word in words))
    assert status == 0, said
    assert (out / "tokenizer.json").read_text() == "{}"
    found = load_file(out / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_another_format_is_asked_for_by_name(saved, tmp_path):
    source, origin, weights = saved
    out = tmp_path / "out"
    out.mkdir()
    words = ["--input-dir", source, "--output-dir", out, "--origin-hf-dir", origin]
    status, said = forked(tmp_path / "log", *words, "--dtype", "bfloat16")
    assert status == 0, said
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], weights[name].bfloat16()) for name in weights)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_is_no_checkpoint_is_refused_in_a_line(saved, tmp_path):
    _, origin, _ = saved
    words = ["--input-dir", tmp_path, "--output-dir", tmp_path / "out", "--origin-hf-dir", origin]
    status, said = forked(tmp_path / "log", *words)
    assert status == 2 and "metadata.json" in said.splitlines()[-1]


def test_a_checkpoint_of_adapters_is_refused_by_name(saved, tmp_path):
    _, origin, _ = saved
    run_ranks(_save_at_once, 1, fsdp_args(origin, save=str(tmp_path / "saved"), lora_rank=4))
    words = ["--input-dir", tmp_path / "saved", "--output-dir", tmp_path / "out", "--origin-hf-dir", origin]
    status, said = forked(tmp_path / "log", *words)
    assert status == 2 and said.splitlines()[-1].endswith("holds adapters alone (wanted: one of all weights)")
