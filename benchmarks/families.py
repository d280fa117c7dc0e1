"""Every family through ``train.py``: one step of imitation, two of practice; the gap of log-probs.

    python benchmarks/families.py                         # all families, minutes each
    python benchmarks/families.py --families glm4 mixtral

Tiny random models in float32 on a cluster of two trainers' or engines' places. Practice is GRPO; where a
family has experts once with routes replayed (``--use-rollout-routing-replay`` behind ``--use-slime-router``)
and once without. Writes for each family the loss of the imitation, and for each step of the practice the mean
absolute difference of the trainer's and the engine's log-probs.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.families import ALL, chat_family  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "families.json"
COMMON = (
    *("--fp32", "--num-gpus-per-node", 8, "--seed", 7, "--actor-num-gpus-per-node", 1),
    *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 512, "--lr", 1e-3, "--weight-decay", 0.0),
)
SFT = (
    *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--debug-train-only"),
    *("--loss-type", "sft_loss", "--disable-compute-advantages-and-returns", "--input-key", "messages"),
    *("--num-rollout", 1, "--rollout-batch-size", 16, "--n-samples-per-prompt", 1),
    *("--global-batch-size", 16),
)
GRPO = (
    *("--colocate", "--input-key", "prompt", "--label-key", "label", "--apply-chat-template"),
    *("--custom-rm-path", "tests.e2e.plugins.token_parity_reward", "--rollout-max-response-len", 12),
    *("--num-rollout", 2, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4),
    *("--global-batch-size", 16),
)
R3 = ("--use-rollout-routing-replay", "--use-slime-router")
TIMEOUT = 600.0  # seconds of a run


class RunFailed(RuntimeError):
    """A run ended with another status than 0; the message has the end of what it said."""


def run_family(family: str) -> dict[str, Any]:
    """The figures of all runs of a family; an ``error`` in the place of those of a run that failed."""
    from slime.models import read_shape

    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        chat_family(family, place / "hf")
        _write_data(place)
        runs: dict[str, tuple[object, ...]] = {"sft": SFT, "grpo": GRPO}
        shape = read_shape(place / "hf")
        if shape.moe is not None:
            runs["grpo, R3"] = (*GRPO, *R3)
        frozen = ["--freeze-indexer"] if shape.indexer is not None else []
        return {name: _figures(name, (*flags, *frozen), place) for name, flags in runs.items()}


def _write_data(place: Path) -> None:
    command = [sys.executable, "examples/calculator_tool/make_data.py", "--output", str(place)]
    sizes = ["--sft-rows", "64", "--rl-rows", "64", "--eval-rows", "8"]
    subprocess.run([*command, *sizes], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _figures(name: str, flags: tuple[object, ...], place: Path) -> dict[str, Any]:
    try:
        steps = _train(name, flags, place)
    except (RunFailed, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    figures: dict[str, Any] = {"grad_norm": [step["train/grad_norm"] for step in steps]}
    if name == "sft":
        return figures | {"loss": steps[0]["train/loss"]}
    return figures | {"gap": [step["train/train_rollout_logprob_abs_diff"] for step in steps]}


def _train(name: str, flags: tuple[object, ...], place: Path) -> list[dict[str, float]]:
    """Runs ``train.py``; returns the metrics of its optimizer steps.

    Raises:
        RunFailed: it did not end well.
    """
    metrics, data = place / f"{name} metrics.jsonl", "sft" if name == "sft" else "rl"
    files = ("--hf-checkpoint", place / "hf", "--prompt-data", place / f"{data}.jsonl")
    words = [*COMMON, *flags, *files, "--metrics-file", metrics]
    command = [sys.executable, "train.py", *map(str, words)]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    log = place / f"{name}.log"
    with log.open("w") as stream:
        status = subprocess.run(
            command, cwd=ROOT, env=env, stdout=stream, stderr=subprocess.STDOUT, timeout=TIMEOUT
        ).returncode
    if status:
        raise RunFailed(f"exit status {status}: {log.read_text()[-2000:]}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["axis"] == "train":
            merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


@contextmanager
def _turn(lock: Path | None) -> Iterator[None]:
    """Alone with the machine, among all that hold the same file locked."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=list(ALL), default=list(ALL))
    parser.add_argument("--lock", type=Path, help="a file that is locked while a family runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    results: dict[str, Any] = {}
    if options.output.is_file():  # families that do not run this time keep their figures
        results = json.loads(options.output.read_text())
    for family in options.families:
        with _turn(options.lock):
            results[family] = run_family(family)
        print(family, json.dumps(results[family]), flush=True)
        ordered = {name: results[name] for name in ALL if name in results}
        options.output.write_text(json.dumps(ordered, indent=2) + "\n")
    failed = [family for family in options.families if "error" in json.dumps(results[family])]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
