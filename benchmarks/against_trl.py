"""A GRPO step against TRL's GRPOTrainer on the same model and machine, and against a floor.

    python3.11 -m venv outputs/trl && outputs/trl/bin/pip install -c constraints/cpu.txt trl
    python benchmarks/against_trl.py --trl-python outputs/trl/bin/python [--sizes 0.5M 10M] [--rounds 2]

256 samples of up to 64 new tokens, one optimizer step, float32, no reference, on two cores: ours with two
trainer processes and two engines of one thread each, TRL in one process with two threads, which wait as
torch has it ("trl") or asleep ("trl_passive"). The runs take turns; of each the first step warms up and is
left out. The floor is the model's FLOPs, those of generating, of training's forward and twice that of its
backward pass, at the rate of a plain matrix product, measured between the rounds on one and on two threads.

Prints and writes JSON: median and least seconds of a step, wall and CPU (all processes); and the ratios of
the medians: TRL over ours (target at 0.5M: at least 1.5) and floor over ours (target at 10M: at least 0.85 on
the wall). Without ``--trl-python`` only ours and the floor are measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "against_trl.json"
SIZES = ("0.5M", "10M")
SAMPLES, GROUP, NEW_TOKENS = 256, 8, 64
CORES = 2
# TRL's micro-batch; with 32 and 64 samples it needs as long, or longer.
TRL_MICRO_BATCH = 256
# OpenMP's threads wait for one another in a loop, unless they are told to sleep.
TRL_SIDES: dict[str, dict[str, str]] = {"trl": {}, "trl_passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
Seconds = dict[str, list[float]]


def run_trl(model: str, prompts: str, steps: int) -> None:
    """TRL's side, in its own environment: prints the seconds of each step but the first."""
    import random

    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(CORES)
    ends: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            ends.append((time.perf_counter(), time.process_time()))

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            max_steps=steps + 1,
            per_device_train_batch_size=TRL_MICRO_BATCH,
            gradient_accumulation_steps=SAMPLES // TRL_MICRO_BATCH,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            learning_rate=1e-5,
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
        )
        GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=lambda completions, **more: [random.random() for _ in completions],
            train_dataset=load_dataset("json", data_files=prompts, split="train"),
            callbacks=[Clock()],
        ).train()
    wall, cpu = zip(*ends, strict=True)
    print(json.dumps({"wall_s": _between(wall), "cpu_s": _between(cpu)}))


def _between(times: Any) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def trl_steps(python: str, model: Path, prompts: Path, steps: int, waiting: dict[str, str]) -> Seconds:
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OMP_WAIT_POLICY")
    }
    env = {**inherited, "OMP_NUM_THREADS": str(CORES), "HF_HUB_OFFLINE": "1", **waiting}
    command = [python, __file__, "--as-trl", str(model), str(prompts), str(steps)]
    run = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def our_steps(model: Path, prompts: Path, steps: int, scratch: Path) -> tuple[Seconds, float]:
    """Seconds of each step, and the mean length of a response."""
    from benchmarks.grpo_step import read_steps, run_steps

    metrics = scratch / f"metrics-{time.monotonic_ns()}.jsonl"
    cpu = run_steps(model, prompts, steps, metrics, ranks=CORES, reference=False)
    rows = read_steps(metrics)
    wall = [row["perf/step_time"] for row in rows]
    length = statistics.mean(row["rollout/response_len/mean"] for row in rows)
    return {"wall_s": wall, "cpu_s": [sum(cpu.values())]}, length


PRODUCT = """
import os, time, torch
threads = int(os.environ["OMP_NUM_THREADS"])
torch.set_num_threads(threads)
clock = time.process_time if threads == 1 else time.perf_counter
a, b, times = torch.randn(4096, 1024), torch.randn(1024, 1024), []
for _ in range(30):
    start = clock()
    a @ b
    times.append(clock() - start)
print(2 * 4096 * 1024 * 1024 / min(times))
"""


def product_rate(threads: int) -> float:
    """FLOPs per second of a product of matrices that do not fit a cache, the best of several."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    run = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(run.stdout)


def step_flops(model: Path, prompts: Path, response: float) -> float:
    """FLOPs of generating 256 samples with responses of this mean length and of training on them."""
    from transformers import AutoTokenizer

    from slime.models import calculate_fwd_flops, shape_from_hf_config

    shape = shape_from_hf_config(model)
    args = Namespace(**{"padded_vocab_size": shape["vocab_size"], **shape})
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
    prompt = statistics.mean(len(tokenizer(text)["input_ids"]) for text in texts)
    return 4 * calculate_fwd_flops([round(prompt + response)] * SAMPLES, args)


def measure(size: str, options: Namespace) -> dict[str, Any]:
    from benchmarks.grpo_step import make_model, write_prompts

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model, prompts = directory / "model", directory / "prompts.jsonl"
        write_prompts(prompts)
        make_model(model, size)
        sides: dict[str, Seconds] = {}
        lengths, rates = [], {1: 0.0, CORES: 0.0}
        for _ in range(options.rounds):
            rates = {threads: max(rate, product_rate(threads)) for threads, rate in rates.items()}
            ours, length = our_steps(model, prompts, options.steps, directory)
            lengths.append(length)
            _extend(sides, "ours", ours)
            for side, waiting in TRL_SIDES.items() if options.trl_python else ():
                found = trl_steps(options.trl_python, model, prompts, options.steps, waiting)
                _extend(sides, side, found)
        flops = step_flops(model, prompts, statistics.mean(lengths))
    floor = {"wall_s": flops / rates[CORES], "cpu_s": flops / rates[1]}
    medians = {side: {k: statistics.median(v) for k, v in s.items()} for side, s in sides.items()}
    ours_median = medians["ours"]
    return {
        "flops": flops,
        "product_flops_per_s": {str(threads): rate for threads, rate in rates.items()},
        "response_len": statistics.mean(lengths),
        "median": medians,
        "least": {side: {k: min(v) for k, v in s.items()} for side, s in sides.items()},
        "floor": floor,
        "floor_over_ours": {k: floor[k] / ours_median[k] for k in floor},
        **{f"{side}_over_ours": _ratio(medians[side], ours_median) for side in TRL_SIDES if side in medians},
    }


def _extend(sides: dict[str, Seconds], side: str, found: Seconds) -> None:
    for kind, seconds in found.items():
        sides.setdefault(side, {}).setdefault(kind, []).extend(seconds)


def _ratio(above: dict[str, float], below: dict[str, float]) -> dict[str, float]:
    return {kind: above[kind] / below[kind] for kind in below}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="the interpreter of an environment with TRL")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, which take turns")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--as-trl", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_trl:
        run_trl(*options.as_trl[:2], int(options.as_trl[2]))
        return
    sys.path.insert(0, str(ROOT))
    results = {size: measure(size, options) for size in options.sizes}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
