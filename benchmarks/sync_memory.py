"""Memory that an update takes beside the weights, in buckets: of a trainer and of an engine, by transport.

    python benchmarks/sync_memory.py [--layers 8 24] [--bucket-mib 64] [--output FILE]

One trainer process (this one, megatron-core, float32) and one embedded engine, as in a run, which is started
anew for each transport. A figure is the peak of a process's resident memory during three updates, over what
was resident before engine and trainer met. Both count the memory that they share, and pages of files that
they map, which the system takes back when it needs them. Models differ in their layers alone, so that what
grows with the model is seen.
"""

import argparse
import ctypes
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is freed is given back at once, in the engine too, or later updates would find it resident.
os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import weight_sync  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sync_memory.json"
UPDATES = 3
TRANSPORTS = ("handle", "process group", "disk")


class ResidentMemory:
    """The resident memory of a process, from now on."""

    def __init__(self, pid: int) -> None:
        self._directory = Path("/proc") / str(pid)
        (self._directory / "clear_refs").write_text("5")  # the peak begins anew
        self._before = self._bytes("VmRSS")

    def extra(self) -> int:
        """The most bytes since then, above those of then."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB$", (self._directory / "status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


def transport_of(name: str, config: Any) -> tuple[Any, int | None]:
    """A transport, and the trainer's GPU that an engine of it shares, if it does."""
    from slime.weight_sync.transports.broadcast import BroadcastTransport
    from slime.weight_sync.transports.disk import DiskTransport
    from slime.weight_sync.transports.handle import HandleTransport

    kinds = {"handle": (HandleTransport, 0), "process group": (BroadcastTransport, None)}
    kind, gpu = kinds.get(name, (DiskTransport, None))
    return kind(config), gpu


def extra_bytes(name: str, args: Any, model: Sequence[torch.nn.Module]) -> dict[str, int]:
    """What some updates take of this process's memory and of an engine's."""
    from slime.backends.megatron_utils.hf_weights import HfWeights
    from slime.config.run import run_config
    from slime.utils.types import EngineEndpoint
    from slime.weight_sync.update import WeightUpdate

    config, versions = run_config(args), count(1)
    process, url = weight_sync.start_engine(Path(args.hf_checkpoint))
    try:
        transport, gpu = transport_of(name, config)
        update = WeightUpdate(config, HfWeights(args, model), [transport])
        ctypes.CDLL(None).malloc_trim(0)
        trainer, engine = ResidentMemory(os.getpid()), ResidentMemory(process.pid)
        update.connect([EngineEndpoint(url, None, 1, gpu)])
        for _ in range(UPDATES):
            update.run(next(versions))
        found = {"trainer": trainer.extra(), "engine": engine.extra()}
        update.disconnect()
    finally:
        process.kill()
        process.wait()
    return found


def measure(layers: int, directory: Path) -> dict[str, Any]:
    """Returns the bytes of a model and, in buckets, what each transport takes beside them."""
    size = f"{layers} layers"
    weight_sync.SIZES[size] = (768, layers, 2048, 12, 4096)
    checkpoint = directory / size
    weight_sync.make_checkpoint(checkpoint, size)
    written = {"update_weight_disk_dir": str(directory / "versions"), "synced_checkpoint": str(checkpoint)}
    args = weight_sync.make_args(checkpoint, **written)
    model = weight_sync.load_model(args)
    nbytes = sum(param.nbytes for chunk in model for param in chunk.parameters())
    found = {name: extra_bytes(name, args, model) for name in TRANSPORTS}
    return {"bytes": nbytes, "buckets": {name: _in_buckets(each) for name, each in found.items()}}


def _in_buckets(found: Mapping[str, int]) -> dict[str, float]:
    return {whose: nbytes / weight_sync.BUCKET_BYTES for whose, nbytes in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weight_sync.BUCKET_BYTES = options.bucket_mib * 1024**2
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(weight_sync.free_port())
    with tempfile.TemporaryDirectory() as directory:
        from slime.backends.megatron_utils.initialize import init
        from slime.config.run import run_config
        from tests.run_args import run_args

        init(run_config(run_args(**weight_sync.ONE_RANK, seed=1)))
        found = {str(layers): measure(layers, Path(directory)) for layers in options.layers}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    report = {"benchmark": "sync_memory", "time": when, "bucket_mib": options.bucket_mib, "layers": found}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    for layers, result in found.items():
        for name, row in result["buckets"].items():
            print(
                f"{layers:>3} layers, {result['bytes'] / weight_sync.BUCKET_BYTES:.1f} buckets: {name:<14}"
                f"{row['trainer']:6.2f} buckets of the trainer, {row['engine']:.2f} of the engine"
            )


if __name__ == "__main__":
    main()
