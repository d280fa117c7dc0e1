"""The schedule of a large rollout: seconds, and how even the work comes out.

    python benchmarks/schedule.py [--samples 65536] [--repeats 3]

Lengths are those of real responses (log-normal, capped at 8,192 tokens), the budget is 16,384 tokens per
micro-batch, in one optimizer step over 8 and 64 data-parallel ranks: token budgets alone, with balanced ranks
(--balance-data), and with micro-batches of like FLOPs, too (--balance-by-flops). Prints and writes JSON:
least wall and CPU seconds (target: below 1); the dearest rank's FLOPs over the mean of all ranks, and the
dearest micro-batch's over the mean or over the dearest sample, if that is more: lower bounds of both
(targets: at most 1.01 where that is balanced).
"""

import argparse
import json
import random
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.models import calculate_fwd_flops
from slime.training.schedule import DpSchedule, build_dp_schedule

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "schedule.json"
LONGEST, BUDGET = 8192, 16384
# A model of 7B parameters.
SHAPE = dict(model_type="qwen2", num_layers=28, hidden_size=3584, ffn_hidden_size=18944, kv_channels=128)
SHAPE |= dict(num_attention_heads=28, num_query_groups=4, padded_vocab_size=152064)
MODES: dict[str, Mapping[str, bool]] = {
    "tokens": {},
    "balanced ranks": {"balance_data": True},
    "balanced FLOPs": {"balance_data": True, "balance_by_flops": True},
}


def make_lengths(samples: int) -> list[int]:
    pick = random.Random(0)
    return [min(max(int(pick.lognormvariate(6.5, 0.8)), 16), LONGEST) for _ in range(samples)]


def make_args(mode: str) -> Namespace:
    flags = dict(balance_data=False, balance_by_flops=False, micro_batch_size=1)
    return Namespace(
        **SHAPE, **{**flags, **MODES[mode]}, use_dynamic_batch_size=True, max_tokens_per_gpu=BUDGET
    )


def above_bounds(args: Any, schedule: DpSchedule, lengths: Sequence[int]) -> dict[str, float]:
    """Returns, of the ranks and of the micro-batches, the dearest one's FLOPs over their lower bound."""
    flops = [calculate_fwd_flops([length], args) for length in lengths]
    ranks, micro_batches = [], []
    for partition, bins in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        ranks.append(sum(flops[p] for p in partition))
        micro_batches += [sum(flops[partition[i]] for i in members) for members in bins]
    total = sum(flops)
    of_micro_batches = max(micro_batches) / max(total / len(micro_batches), max(flops))
    return {"ranks": max(ranks) / (total / len(ranks)), "micro_batches": of_micro_batches}


def measure(mode: str, dp_size: int, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    args, numbers = make_args(mode), [*range(len(lengths))]
    layout = dict(dp_size=dp_size, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)
    wall, cpu = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        schedule = build_dp_schedule(
            args, layout, lengths, global_batch_size=len(lengths), rollout_indices=numbers
        )
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return {
        "wall_s": min(wall),
        "cpu_s": min(cpu),
        "micro_batches_per_rank": schedule.num_microbatches[0],
        "over_lower_bound": above_bounds(args, schedule, lengths),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    lengths = make_lengths(options.samples)
    results = {
        f"{mode}, DP {dp_size}": measure(mode, dp_size, lengths, options.repeats)
        for mode in MODES
        for dp_size in (8, 64)
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
