"""The FSDP trainer against the Megatron trainer: the same optimizer step, one process, one thread.

    python benchmarks/fsdp_step.py [--size 0.5M] [--samples 64] [--repeats 3]

One policy-gradient step over the 64 samples of `trainer_packing`, float32, at most 2,048 tokens per
micro-batch. Prints and writes JSON: wall and CPU seconds, the least of the repeats, which alternate between
the trainers; and FSDP's tokens per second in Megatron's.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.ray.train_worker import TrainWorker

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fsdp_step.json"
VARIANTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp, checkpointing": {"gradient_checkpointing": True},
    "fsdp, padded rows": {"attn_implementation": "sdpa"},
}


def step_of(make_args: Callable[..., Any], directory: str, batch: dict, **flags: Any) -> Callable[[], None]:
    """One optimizer step of a trainer, its log-probs not computed anew."""
    from benchmarks.trainer_packing import BUDGET
    from tests.trainer_batches import split

    args = make_args(
        directory,
        max_tokens_per_gpu=BUDGET,
        global_batch_size=len(batch["tokens"]),
        data_pad_size_multiplier=128,
        lr=1e-5,
        clip_grad=1.0,
        **flags,
    )
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, batch, worker.parallel_config())
    return lambda: worker.train_shard(0, shard) and None


def run_size(size: str, samples: int | None, repeats: int) -> dict[str, Any]:
    # The flags of a small run, which the tests keep.
    sys.path.insert(0, str(ROOT))
    from benchmarks.trainer_packing import SAMPLES, SIZES, make_batch, make_model, measure
    from tests.backends.fsdp_harness import fsdp_args
    from tests.trainer_batches import trainer_args

    with tempfile.TemporaryDirectory() as directory:
        make_model(directory, size)
        batch = make_batch(SIZES[size][-1], samples or SAMPLES)
        steps = {"megatron": step_of(trainer_args, directory, batch)}
        for name, flags in VARIANTS.items():
            steps[name] = step_of(fsdp_args, directory, batch, **flags)
        seconds = measure(steps, repeats)
    tokens = sum(len(sample) for sample in batch["tokens"])
    megatron = seconds["megatron"]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": {name: tokens / value["wall_s"] for name, value in seconds.items()},
        "ratio_wall": {name: megatron["wall_s"] / seconds[name]["wall_s"] for name in VARIANTS},
        "ratio_cpu": {name: megatron["cpu_s"] / seconds[name]["cpu_s"] for name in VARIANTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=("0.5M", "10M"), default="0.5M", help="parameters of the model")
    parser.add_argument("--samples", type=int, help="of the step; default those of trainer_packing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    result = run_size(options.size, options.samples, options.repeats)
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    results[options.size] = result
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
