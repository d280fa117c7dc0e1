"""Weight updates from rank to rank against updates of whole weights: two trainer ranks, an engine of two.

    python benchmarks/shard_sync.py [--sizes 10M 100M] [--repeats 5] [--output FILE]

Two trainer processes (megatron-core, TP 2, float32) and one embedded engine with two ranks. All ways take
turns in one run, so that ratios do not depend on the machine's mood. As with --colocate: whole weights by
handle, which trainer ranks gather and of which each hands over all; and what each of the engine's ranks
keeps. As to engines elsewhere, over a process group: whole weights that rank 0 gathers and broadcasts; and
what each of the engine's ranks keeps, from the rank that holds it. An update is timed from the first bucket
to continue, HTTP included; the pause, and the engine's own part of it, its commit, are told as well. Medians,
after one update of each that does not count.

Bytes are those that all ranks handed over; what is broadcast counts once.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.weight_sync import BUCKET_BYTES, SIZES, make_checkpoint, start_engine  # noqa: E402
from slime.utils.types import EngineEndpoint  # noqa: E402
from tests.megatron_harness import make_args, run_ranks  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "shard_sync.json"
WHOLE, SHARDS = "whole weights", "from rank to rank"
WHOLE_ELSEWHERE, SHARDS_ELSEWHERE = "whole weights, elsewhere", "from rank to rank, elsewhere"
PAIRS = {SHARDS: WHOLE, SHARDS_ELSEWHERE: WHOLE_ELSEWHERE}


def updates(
    rank: int, args: Any, endpoint: EngineEndpoint, repeats: int
) -> dict[str, list[dict[str, float]]]:
    """What each update of all ways took on this rank."""
    import torch.distributed as dist

    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model
    from slime.config.run import run_config
    from slime.weight_sync.transports.broadcast import BroadcastTransport
    from slime.weight_sync.transports.handle import HandleTransport
    from slime.weight_sync.transports.shard_group import ShardGroupTransport
    from slime.weight_sync.transports.shards import ShardTransport
    from slime.weight_sync.update import WeightUpdate

    config = run_config(args)
    init(config)
    model = get_model(config)
    load_hf_weights(args, model, args.hf_checkpoint)
    kinds = {WHOLE: HandleTransport, SHARDS: ShardTransport}
    kinds |= {WHOLE_ELSEWHERE: BroadcastTransport, SHARDS_ELSEWHERE: ShardGroupTransport}
    ways = {
        name: WeightUpdate(config, HfWeights(args, model), [kind(config)], writer="one")
        for name, kind in kinds.items()
    }
    for update in ways.values():
        update.connect([endpoint])
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, update in ways.items():
            dist.barrier()
            start = time.perf_counter()
            report = update.run(1)
            took = {"wall_s": time.perf_counter() - start, "bytes": report.sent}
            took |= {"pause_s": report.pause, "commit_s": report.commit, "transfer_s": report.transfer}
            taken[name].append(took)
    for update in ways.values():
        update.disconnect()
    return {name: rows[1:] for name, rows in taken.items()}


def run(size: str, repeats: int, directory: Path) -> dict[str, Any]:
    checkpoint = directory / size
    make_checkpoint(checkpoint, size)
    engine, url = start_engine(checkpoint, "--tp-size", "2")
    flags = {"colocate": True, "update_weight_buffer_size": BUCKET_BYTES}
    args = make_args(checkpoint, tensor_model_parallel_size=2, **flags)
    try:
        ranks = run_ranks(updates, 2, args, EngineEndpoint(url, None, 2, 0), repeats, timeout=3600)
    finally:
        engine.kill()
        engine.wait()
    rows = {}
    for name in (*PAIRS, *PAIRS.values()):
        first = ranks[0][name]  # rank 0 speaks to the engine
        rows[name] = {key: statistics.median(one[key] for one in first) for key in first[0]}
        rows[name]["bytes"] = sum(taken[name][-1]["bytes"] for taken in ranks)
    for shards, whole in PAIRS.items():
        for key in ("wall_s", "pause_s", "transfer_s", "commit_s"):
            rows[shards][f"{key}_over_whole"] = rows[shards][key] / rows[whole][key]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M", "100M"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = {size: run(size, options.repeats, Path(directory)) for size in options.sizes}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    report = {"benchmark": "shard_sync", "time": when, "repeats": options.repeats, "sizes": results}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    for size, rows in results.items():
        for name, row in rows.items():
            print(
                f"{size:>5} {name:<28} {row['bytes'] / 1e6:8.1f} MB, {row['wall_s'] * 1e3:.1f} ms, "
                f"pause {row['pause_s'] * 1e3:.1f} ms, commit {row['commit_s'] * 1e3:.1f} ms"
                + (f", {row['wall_s_over_whole']:.2f} of whole weights" if name in PAIRS else "")
            )


if __name__ == "__main__":
    main()
