"""The benchmarks can be run, at their smallest; what they measure there means nothing.

Those that docs/performance.md, docs/rollouts.md, docs/examples.md, docs/fleets.md and docs/command.md print
get the words that stand there.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forking import ForkedPythons, ForkedScript
from tests.page_runs import printed

ROOT = Path(__file__).parents[2]
# Not families, which starts a cluster after the other; those that start one are nightly, as are those that
# take seconds.
SCRIPTS = {
    "trainer_packing": ["--size", "0.5M", "--samples", "8", "--repeats", "1"],
    "fsdp_step": ["--size", "0.5M", "--samples", "8", "--repeats", "1"],
    "data_loading": ["--gigabytes", "0.001", "--batch", "2", "--batches", "2"],
    "gae": ["--batch", "2", "--length", "300", "--repeats", "1"],
    "weight_sync": ["--sizes", "10M", "--repeats", "1"],
    "sync_model": ["--engines", "2", "--repeats", "1"],
    "sync_memory": ["--layers", "1", "--bucket-mib", "4"],
    "shard_sync": ["--sizes", "10M", "--repeats", "1"],
    "delta_ranks": ["--size", "tiny", "--repeats", "1", "--rounds", "1"],
    "math_grading": ["--labels", "5", "--repeats", "1"],
    "schedule": ["--samples", "2048", "--repeats", "1"],
    "against_trl": ["--sizes", "0.5M", "--rounds", "1", "--steps", "2"],
    "fully_async": ["--rounds", "1", "--steps", "1"],
    "router": ["--connections", "4", "--seconds", "0.2", "--rounds", "1"],
    "radix_tree": ["--trajectories", "40", "--characters", "300", "--dict-trajectories", "20"],
    "rollout_buffer": ["--items", "16", "--tokens", "10", "--clients", "2", "--rounds", "1"],
    "rollout_driver": ["--samples", "64", "--rounds", "1"],
    "convert_30b": ["--layers", "1", "--experts", "2", "--vocab-size", "512"],
    "grpo_step": ["--sizes", "0.5M", "--steps", "2"],
    "observing": ["--size", "0.5M", "--rounds", "1", "--steps", "2"],
    "open_dashboard": ["--steps", "200", "--gigabytes", "0.01", "--repeats", "1"],
    "startup": ["--rounds", "1"],
    "recovery": ["--rounds", "1"],
    "killed_engines": ["--steps", "4"],
    "chaos": ["--faults", "1", "--steps", "2", "--layouts", "colocated"],
    "soak": ["--minutes", "1", "--fault-every", "0.5", "--warm-up", "0.2"],
    "adapter_turns": [
        *("--sessions", "2", "--context", "1024", "--turns", "1", "--rounds", "1"),
        *("--many", "3", "--many-context", "256"),
    ],
    "gpu_loop": [
        *("--size", "tiny", "--dtype", "float32", "--engine", "embedded", "--steps", "1", "--prompts", "2"),
        *("--samples", "2", "--new-tokens", "8"),
    ],
}
# These need no process of their own, whose start would take the most of the time; what they start is forked.
MODULES = {
    "engine_throughput": ["--sizes", "0.5M", "--rounds", "1", "--new-tokens", "8"],
    "generic_executor": ["--families", "qwen2_moe", "--rounds", "1", "--new-tokens", "4"],
    "gpu_trainer": [
        *("--size", "tiny", "--dtype", "float32", "--recompute", "--tokens", "512", "--length", "128"),
        *("--rows", "1", "--steps", "1", "--peak-tflops", "0.1"),
    ],
    "in_flight": [
        *("--modes", "in_place", "--seconds", "0.05", "--turns", "2", "--answers", "1", "--tokens", "60"),
    ],
    "fsdp_architectures": ["--architectures", "gpt2", "--seeds", "0"],
    "hf_load": ["--gigabytes", "0.15", "--repeats", "1"],
    "log_probs": ["--rows", "8", "--repeats", "1"],
    "moe_dispatch": ["--cases", "8 experts", "--repeats", "1"],
    "random_syncs": ["--syncs", "50"],
    "simulate": ["--histories", "100", "--bugs", "0"],
    "sandbox_pool": ["--starts", "2"],
}
CLUSTER = (
    "against_trl",
    "fully_async",
    "grpo_step",
    "observing",
    "gpu_loop",
    "startup",
    "recovery",
    "chaos",
    "killed_engines",
    "soak",
)
NIGHTLY = (
    *(*CLUSTER, "convert_30b", "rollout_driver", "router", "data_loading"),
    *("in_flight", "generic_executor", "hf_load", "random_syncs", "simulate", "adapter_turns"),
    *("sync_model", "sync_memory", "shard_sync", "delta_ranks", "open_dashboard"),
)
# Seconds of their time are imports.
FORKED = (
    *("trainer_packing", "fsdp_step", "gae", "schedule", "weight_sync", "sync_memory", "math_grading"),
    *("shard_sync", "delta_ranks", "convert_30b", "rollout_driver", "router", "radix_tree", "data_loading"),
)
# Their engine, or each of their sides, is a Python of its own.
OF_SUBPROCESSES = {"engine_throughput": "engine_throughput", "generic_executor": "engine_throughput"}
OF_SUBPROCESSES |= {"gpu_trainer": "gpu_trainer"}


def words_for(script: str, smallest: list[str], output: Path) -> list[str]:
    """What a page gives a benchmark, with a stand-in for the Python of TRL, and then what makes it small."""
    on_pages = [word for command in printed(f"python benchmarks/{script}.py") for word in command.words[2:]]
    if "PYTHON" in on_pages:
        on_pages[on_pages.index("PYTHON")] = str(python_of_trl(output.parent))
    return [*on_pages, *smallest, "--output", str(output)]


def python_of_trl(directory: Path) -> Path:
    """What stands for an interpreter of an environment with TRL: each step takes it a second."""
    python = directory / "python"
    python.write_text(
        """#!/bin/sh\n[ "$2" = --as-trl ] && echo '{"wall_s": [1.0, 1.0], "cpu_s": [1.0, 1.0]}'\n"""
    )
    python.chmod(0o755)
    return python


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            name,
            marks=[*[pytest.mark.cluster] * (name in CLUSTER), *[pytest.mark.nightly] * (name in NIGHTLY)],
        )
        for name in SCRIPTS
    ],
)
def test_a_benchmark_writes_its_figures(script: str, tmp_path: Path) -> None:
    output, log = tmp_path / "figures.json", tmp_path / "log"
    path, words = ROOT / f"benchmarks/{script}.py", words_for(script, SCRIPTS[script], output)
    env = {"PYTHONPATH": str(ROOT)}
    if script in FORKED:
        status = ForkedScript(path, words, log, env=env, cwd=ROOT).wait(800)
    else:
        with log.open("w") as stream:
            status = subprocess.run(
                [sys.executable, path, *words],
                cwd=ROOT,
                env={**os.environ, **env},
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=800,
            ).returncode
    assert status == 0, log.read_text()[-4000:]
    assert json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in MODULES],
)
def test_a_benchmark_that_is_imported_writes_them_too(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, module = tmp_path / "figures.json", importlib.import_module(f"benchmarks.{script}")
    if script in OF_SUBPROCESSES:
        monkeypatch.setattr(
            f"benchmarks.{OF_SUBPROCESSES[script]}.subprocess", ForkedPythons(tmp_path / "log")
        )
    module.main(words_for(script, MODULES[script], output))
    assert json.loads(output.read_text())
