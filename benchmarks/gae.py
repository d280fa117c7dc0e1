"""Generalised advantage estimation in chunks against the loop over tokens.

    python benchmarks/gae.py [--batch 256] [--length 131072] [--repeats 3]

Rewards and values [batch, length] in float32, on as many threads as torch takes. The loop is `vanilla_gae`,
which goes from the last token to the first with operations over the batch. The floor is the sum of the two
inputs written to two new tensors: no method reads and writes less. Prints and writes JSON: the best seconds
of the repeats, which take turns; how many times the loop takes as long as the other two (target: 50 for
chunks, which needs a floor above that); and the largest difference of an advantage.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from slime.training.estimators.gae import chunked_gae, vanilla_gae

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "gae.json"
GAMMA, LAMBDA = 1.0, 0.95


def floor(rewards: torch.Tensor, values: torch.Tensor, *_: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The least that two results from two inputs cost."""
    return rewards + values, rewards + values


CONTENDERS: dict[str, Callable] = {"loop": vanilla_gae, "chunked": chunked_gae, "floor": floor}


def timed(compute: Callable, rewards: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, dict]:
    wall, cpu = time.perf_counter(), time.process_time()
    advantages, _ = compute(rewards, values, GAMMA, LAMBDA)
    return advantages, {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def measure(batch: int, length: int, repeats: int) -> dict:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(batch, length, generator=generator) for _ in range(2))
    best = {name: {"wall_s": 1e9, "cpu_s": 1e9} for name in CONTENDERS}
    difference = 0.0
    for _ in range(repeats):
        found = {}
        for name, compute in CONTENDERS.items():
            found[name], seconds = timed(compute, rewards, values)
            best[name] = {key: min(value, seconds[key]) for key, value in best[name].items()}
        difference = float((found["loop"] - found["chunked"]).abs().max())
    return {
        "batch": batch,
        "length": length,
        "threads": torch.get_num_threads(),
        "seconds": best,
        "ratio": {name: _ratios(best["loop"], best[name]) for name in ("chunked", "floor")},
        "largest_difference": difference,
    }


def _ratios(slow: dict, fast: dict) -> dict:
    return {key: slow[key] / max(fast[key], 1e-9) for key in slow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = measure(options.batch, options.length, options.repeats)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
