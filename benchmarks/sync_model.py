"""How long a weight update takes, by a model of four figures: held against measured updates, then for 1T.

    python benchmarks/sync_model.py [--size 10M] [--engines 2 4 8] [--repeats 3] [--output FILE]

The model: the trainer prepares all bytes alone; then engines take them, as many side by side as there are
lanes; and the trainer's process spends its time on each request to each engine. The figures are taken from
updates of one embedded engine, of which those of more engines on the same machine follow; they are measured
too. With figures of a cluster in the place of this machine's the same formula says what 1,000 engines take.
All updates take turns, so that other work on the machine is in all of them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count, product
from math import ceil, inf
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import weight_sync  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sync_model.json"
REQUESTS = 5
"""To each engine beside those of buckets: pause, flush, begin, end, continue."""
BUCKET_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Update:
    """The figures of a transport.

    Attributes:
        prepare: bytes per second that the trainer makes ready alone; infinite where it sends what it has.
        take: bytes per second that an engine takes and loads.
        lanes: engines that do so side by side at that rate.
        request: seconds of the trainer's process for a request to one engine.
    """

    prepare: float
    take: float
    lanes: float
    request: float


def seconds(update: Update, nbytes: float, engines: int, requests: int) -> float:
    """Returns what an update of so many bytes takes, with so many requests to each engine."""
    took = nbytes / update.take * max(1.0, engines / update.lanes)
    return nbytes / update.prepare + took + engines * requests * update.request


def requests_of(nbytes: float, bucket: float) -> int:
    """Counts requests to each engine where its buckets are announced."""
    return REQUESTS + ceil(nbytes / bucket)


def one_after_the_other(*rates: float) -> float:
    """Joins the rates of steps that each take all bytes."""
    return 1 / sum(1 / rate for rate in rates)


@dataclass(frozen=True)
class Cluster:
    """Assumptions about machines that we have not measured; bytes per second.

    Attributes:
        link: of one host, 400 Gb/s.
        write: of one host to a shared file system.
        read: of one host from it.
        read_by_all: of all hosts together.
        load: of an engine from its own disk or memory into its GPUs.
        find: of changes, by rank 0; that is one core's figure of weight_sync.py.
        made: of changes in whole weights, by one core of each engine's host, likewise.
        changed: the part of all bytes that changes have.
    """

    link: float = 50e9
    write: float = 10e9
    read: float = 10e9
    read_by_all: float = 500e9
    load: float = 20e9
    find: float = 0.2e9
    made: float = 0.6e9
    changed: float = 0.048


def on_cluster(
    cluster: Cluster, request: float, nbytes: float, engines: int, bucket: float
) -> dict[str, float]:
    """Returns seconds by transport."""
    lanes = cluster.read_by_all / cluster.read
    whole = one_after_the_other(cluster.read, cluster.load)
    found = one_after_the_other(cluster.find, cluster.write / cluster.changed)
    made = one_after_the_other(cluster.read / cluster.changed, cluster.made, cluster.load)
    changes = cluster.read_by_all / cluster.changed / made
    cases = {
        # each rank passes on what it gets, so that every link carries every byte once
        "process group": (Update(inf, cluster.link, inf, request), requests_of(nbytes, bucket)),
        "disk": (Update(cluster.write, whole, lanes, request), REQUESTS),
        "changes": (Update(found, made, changes, request), REQUESTS + 1),
    }
    return {name: seconds(one, nbytes, engines, sent) for name, (one, sent) in cases.items()}


def figures(rows: dict[str, float], nbytes: int, requests: int, prepared: float, request: float) -> Update:
    """Takes what the updates of one engine say, on as many cores as this machine has.

    Args:
        rows: wall and CPU seconds.
        prepared: wall seconds of them in which the trainer was alone.
    """
    taking = max(rows["wall_s"] - prepared - requests * request, 1e-9)
    work = max(rows["cpu_s"] - prepared - requests * request, 1e-9)
    lanes = max(1.0, (os.cpu_count() or 1) * taking / work)
    return Update(nbytes / prepared if prepared else inf, nbytes / taking, lanes, request)


def measured(
    updates: dict[tuple[str, int], Callable[[], Any]], repeats: int, engines: Sequence[psutil.Process]
) -> dict[tuple[str, int], dict[str, float]]:
    """Takes medians of the seconds of updates, which take turns."""
    samples: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in updates}
    for _ in range(repeats + 1):
        for key, run in updates.items():
            cpu, wall = _cpu_seconds(engines), time.perf_counter()
            report = run()
            took = {"wall_s": time.perf_counter() - wall, "transfer_s": report.transfer}
            samples[key].append({**took, "cpu_s": _cpu_seconds(engines) - cpu})
    return {
        key: {name: statistics.median(one[name] for one in taken[1:]) for name in taken[0]}
        for key, taken in samples.items()
    }


def _cpu_seconds(engines: Sequence[psutil.Process]) -> float:
    times = [engine.cpu_times() for engine in engines]
    return time.process_time() + sum(one.user + one.system for one in times)


def seconds_per_request(url: str) -> float:
    """Measures the CPU time of this process for a request to an engine."""
    from slime.backends.sglang_utils.client import EngineClient
    from slime.utils.types import EngineEndpoint

    client = EngineClient(EngineEndpoint(url, None, 1, None))
    client.update_weight_version("1")
    start, rounds = time.process_time(), 50
    for _ in range(rounds):
        client.update_weight_version("1")
    return (time.process_time() - start) / rounds


def measure(size: str, counts: Sequence[int], repeats: int, directory: Path) -> dict[str, Any]:
    """Measures updates of one engine, and of more of them beside what follows."""
    from slime.backends.megatron_utils.hf_weights import HfWeights
    from slime.config.run import run_config
    from slime.utils.types import EngineEndpoint
    from slime.weight_sync.transports.broadcast import BroadcastTransport
    from slime.weight_sync.transports.disk import DiskTransport
    from slime.weight_sync.update import WeightUpdate

    checkpoint, versions = directory / size, count(1)
    weight_sync.make_checkpoint(checkpoint, size)
    weight_sync.BUCKET_BYTES = BUCKET_BYTES
    written = {"update_weight_disk_dir": str(directory / "versions"), "synced_checkpoint": str(checkpoint)}
    args = weight_sync.make_args(checkpoint, **written)
    model = weight_sync.load_model(args)
    nbytes = sum(param.nbytes for chunk in model for param in chunk.parameters())
    config, weights = run_config(args), HfWeights(args, model)
    kinds = {"process group": BroadcastTransport, "disk": DiskTransport}
    requests = {"process group": requests_of(nbytes, BUCKET_BYTES), "disk": REQUESTS}
    known: dict[str, Update] = {}
    rows = []
    with ExitStack() as running:
        urls, processes = [], []
        for _ in range(max(counts)):
            process, url = weight_sync.start_engine(checkpoint)
            running.callback(process.wait)
            running.callback(process.kill)
            urls.append(url)
            processes.append(psutil.Process(process.pid))
        updates: dict[tuple[str, int], WeightUpdate] = {}
        for name, engines in product(kinds, (1, *counts)):
            update = WeightUpdate(config, weights, [kinds[name](config)], writer="one")
            updates[name, engines] = update
            update.connect([EngineEndpoint(url, None, 1, None) for url in urls[:engines]])
        runs = {key: lambda one=one: one.run(next(versions)) for key, one in updates.items()}
        found = measured(runs, repeats, processes)
        request = seconds_per_request(urls[0])
        for update in updates.values():
            update.disconnect()
    for name in kinds:
        prepared = found[name, 1]["transfer_s"] if name == "disk" else 0.0
        known[name] = figures(found[name, 1], nbytes, requests[name], prepared, request)
        for engines in counts:
            said = seconds(known[name], nbytes, engines, requests[name])
            took = found[name, engines]["wall_s"]
            rows.append({"transport": name, "engines": engines, "measured_s": took, "model_s": said})
    return {
        "bytes": nbytes,
        "figures": {name: _finite(one) for name, one in known.items()},
        "rows": [{**row, "error": row["model_s"] / row["measured_s"] - 1} for row in rows],
    }


def _finite(update: Update) -> dict[str, float | None]:
    """Writes None for what is infinite, which JSON has no word for."""
    return {name: None if value == inf else value for name, value in asdict(update).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=weight_sync.SIZES, default="10M")
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(weight_sync.free_port())
    with tempfile.TemporaryDirectory() as directory:
        from slime.backends.megatron_utils.initialize import init
        from slime.config.run import run_config
        from tests.run_args import run_args

        init(run_config(run_args(**weight_sync.ONE_RANK, seed=1)))
        found = measure(options.size, options.engines, options.repeats, Path(directory))
    request = found["figures"]["process group"]["request"]
    buckets = {"512 MiB": 512 * 1024**2, "8 GiB": 8 * 1024**3}
    found["1T"] = {name: on_cluster(Cluster(), request, 2e12, 1000, size) for name, size in buckets.items()}
    found |= {"cluster": asdict(Cluster()), "cores": os.cpu_count(), "repeats": options.repeats}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    report = {"benchmark": "sync_model", "time": when, "size": options.size, **found}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    for row in found["rows"]:
        print(
            f"{row['transport']:<14} {row['engines']:>3} engines {row['measured_s'] * 1e3:8.1f} ms, "
            f"by the model {row['model_s'] * 1e3:8.1f} ms ({row['error']:+.0%})"
        )
    for bucket, times in found["1T"].items():
        for name, took in times.items():
            print(f"1T to 1,000 engines, buckets of {bucket:<8} {name:<14} {took:9.1f} s")


if __name__ == "__main__":
    main()
