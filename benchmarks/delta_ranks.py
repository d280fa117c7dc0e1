"""Changes of weights in a directory, by how many trainer ranks share the work: seconds and memory.

    python benchmarks/delta_ranks.py [--size 100M] [--repeats 3] [--rounds 2] [--output FILE]

Trainers of one, two and four processes (megatron-core, bfloat16, TP or PP 2) publish versions into a
directory without engines, so that the trainer's part is alone: gathering, finding changes, writing,
checking, moving the base on. Every float32 weight moves by 1e-6 before each, as after a step of Adam's
first kind. Each layout comes twice: with ranks that share the work, and with rank 0 doing all of it, as
where others do not see the directory. All come one after the other, in turns of so many rounds; a figure is
the median over all updates of changes, of the slowest rank. Memory is what the fullest rank keeps of the
base, and the peak of its resident memory over what was resident before its first update. The machine's load
is noted: ranks beyond its idle cores gain nothing.
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
from benchmarks.sync_memory import ResidentMemory  # noqa: E402
from benchmarks.weight_sync import SIZES, make_checkpoint  # noqa: E402
from tests.megatron_harness import make_args, run_ranks  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "delta_ranks.json"
SIZES["tiny"] = (128, 4, 256, 4, 320)
BUCKET_BYTES = 64 * 1024**2
LAYOUTS = {"1 rank": (1, 1), "2 ranks, TP": (2, 1), "2 ranks, PP": (1, 2), "4 ranks, TP and PP": (2, 2)}
"""Tensor-parallel ranks and pipeline stages."""
ALONE = ", rank 0 alone"


def updates(rank: int, args: Any, repeats: int, is_shared: bool) -> dict[str, Any]:
    """What this rank's updates took, after a whole one that does not count."""
    import torch
    import torch.distributed as dist

    from slime.backends.megatron_utils.hf_weights import HfWeights, load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model
    from slime.config.run import run_config
    from slime.weight_sync.update import WeightUpdate
    from slime.weight_sync.versions.folder import Folder

    if not is_shared:
        Folder.has_taken = lambda self, writer: False  # type: ignore[method-assign]
    torch.set_num_threads(1)
    config = run_config(args)
    init(config)
    model = get_model(config)
    load_hf_weights(args, model, args.hf_checkpoint)
    params = [param.data for chunk in model for param in chunk.parameters()]
    exact = [param.float() for param in params]
    update = WeightUpdate(config, HfWeights(args, model))
    memory = ResidentMemory(os.getpid())
    update.connect([])
    update.run(1)
    taken = []
    for version in range(2, 2 + repeats):
        for param, weight in zip(params, exact, strict=True):
            weight += 1e-6 * torch.randn_like(weight).sign()
            param.copy_(weight)
        dist.barrier()
        start = time.perf_counter()
        report = update.run(version)
        row = {"wall_s": time.perf_counter() - start, "transfer_s": report.transfer}
        taken.append(row | {"sent": report.sent, "density": report.density})
    (transport,) = update._transports
    found = {"held": transport._held.nbytes, "extra": memory.extra(), "taken": taken}
    update.disconnect()
    return found


def run(size: str, repeats: int, rounds: int, directory: Path) -> dict[str, Any]:
    """By layout what an update takes, and how that compares with one rank's."""
    checkpoint = directory / size
    make_checkpoint(checkpoint, size)
    ways = {name: (*layout, True) for name, layout in LAYOUTS.items()}
    ways |= {name + ALONE: (*layout, False) for name, layout in LAYOUTS.items() if layout != (1, 1)}
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in sorted(ways)}
    for number in range(rounds):
        for name in found:
            tensor, pipeline, is_shared = ways[name]
            args = make_args(
                checkpoint,
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                params_dtype=_bfloat16(),
                bf16=True,
                update_weight_buffer_size=BUCKET_BYTES,
                update_weight_transport="disk",
                update_weight_mode="delta",
                publish_weights=True,
                update_weight_disk_dir=str(directory / f"versions of {name}, {number}"),
                update_weight_disk_keep_files=False,
                update_weight_delta_encoding="xor",
                update_weight_delta_checksum="xxh3-128",
                synced_checkpoint=str(checkpoint),
            )
            found[name].append(run_ranks(updates, tensor * pipeline, args, repeats, is_shared, timeout=3600))
    rows = {name: _row(each) for name, each in found.items()}
    for name, row in rows.items():
        alone = rows.get(name + ALONE, rows["1 rank"])
        if not name.endswith(ALONE):
            keys = "wall_s", "transfer_s", "held", "extra"
            row |= {f"{key}_over_alone": row[key] / alone[key] for key in keys}
    return rows


def _bfloat16() -> Any:
    import torch

    return torch.bfloat16


def _row(rounds: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Returns seconds of the slowest rank in each update, and bytes of the fullest."""
    times = {
        key: statistics.median(
            max(one[key] for one in taken)
            for ranks in rounds
            for taken in zip(*(rank["taken"] for rank in ranks), strict=True)
        )
        for key in ("wall_s", "transfer_s")
    }
    last = rounds[-1]
    sizes = {key: max(rank[key] for rank in last) for key in ("held", "extra")}
    sizes["sent"] = sum(rank["taken"][-1]["sent"] for rank in last)
    return {**times, **sizes, "density": max(rank["taken"][-1]["density"] for rank in last)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=("tiny", "100M"), default="100M")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    load, when = os.getloadavg()[0], datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as directory:
        rows = run(options.size, options.repeats, options.rounds, Path(directory))
    report = {"benchmark": "delta_ranks", "time": when, "size": options.size, "cores": os.cpu_count()}
    report |= {"load_at_start": round(load, 1), "load_at_end": round(os.getloadavg()[0], 1)}
    report |= {"repeats": options.repeats, "rounds": options.rounds, "layouts": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    for name, row in rows.items():
        told = (
            f"{options.size:>5} {name:<33} {row['wall_s'] * 1e3:6.0f} ms, {row['held'] / 1e6:6.1f} MB kept, "
        )
        told += f"{row['extra'] / 1e6:4.0f} MB at most, {row['sent'] / 1e6:.2f} MB of changes"
        if "wall_s_over_alone" in row:
            told += f"; {row['wall_s_over_alone']:.2f} of the time and {row['held_over_alone']:.2f} kept"
        print(told)


if __name__ == "__main__":
    main()
