"""Bytes per second of weight-sync transports, against a plain copy and what their paths carry at most.

    python benchmarks/weight_sync.py [--sizes 10M 100M] [--repeats 5] [--output FILE]

1B parameters take 16 GB of memory, and as much of disk.

One trainer process (this one, megatron-core, float32) and one embedded engine, as in a run. A sync is timed
from pause to continue, HTTP included; the plain copy moves every parameter once into tensors that exist
already. The floor of a transport is what its path takes without us: by handle two such copies, into the flat
tensor and out of it; over the process group a broadcast of the same buckets by gloo alone, to another process
that receives them in the same memory each time; by disk a file of as many bytes that is written in a row,
with which only the writing of a version is compared: engines generate meanwhile. Neither calls fsync, and
both start with nothing left to write and with warm memory. Of a pause the engine's own
part is told, its commit, in which it takes the weights into its own. Everything
happens in one run, in turns, so that the ratios do not depend on the machine's mood. CPU seconds are
those of trainer and engine together.

Changes are those of bfloat16 weights after a step of Adam's first kind: every float32 weight moves by 1e-6.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.disk_floor import file_alone  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "weight_sync.json"
BUCKET_BYTES = 512 * 1024**2
_WRITERS = ("file_alone", "disk")
_CHANGED = 10**9
"""Bytes of the largest model whose changes are taken: they are held several times over."""

# hidden size, layers, FFN size, heads, vocabulary
SIZES = {
    "0.5M": (128, 3, 256, 4, 320),
    "10M": (320, 7, 1024, 8, 4096),
    "100M": (768, 12, 2560, 12, 16384),
    "1B": (2048, 19, 6144, 16, 32768),
}


ONE_RANK = dict(
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None,
    context_parallel_size=1,
    allgather_cp=False,
)


def make_checkpoint(path: Path, size: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, ffn, heads, vocab = SIZES[size]
    config = Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        vocab_size=vocab,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(path)


def make_args(checkpoint: Path, **flags: Any) -> Namespace:
    from slime.models import shape_from_hf_config
    from tests.run_args import run_args

    shape = shape_from_hf_config(checkpoint)
    return run_args(
        **shape,
        hf_checkpoint=str(checkpoint),
        padded_vocab_size=shape["vocab_size"],
        bf16=False,
        fp32=True,
        **ONE_RANK,
        update_weight_buffer_size=BUCKET_BYTES,
        **flags,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_engine(checkpoint: Path, *flags: str) -> tuple[subprocess.Popen[bytes], str]:
    from slime.backends.sglang_utils.client import EngineClient
    from slime.utils.types import EngineEndpoint

    port = free_port()
    command = [sys.executable, "-m", "slime.backends.embedded_engine", "--model-path", str(checkpoint)]
    command += ["--port", str(port), "--skip-tokenizer-init", "--dtype", "float32", *flags]
    process = subprocess.Popen(command, cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    client = EngineClient(EngineEndpoint(url, None, 1, None))
    deadline = time.monotonic() + 120
    while not client.health():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"error: the engine at {url} did not start")
        time.sleep(0.2)
    return process, url


def load_model(args: Namespace) -> list[torch.nn.Module]:
    from slime.backends.megatron_utils.hf_weights import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model
    from slime.config.run import run_config

    model = get_model(run_config(args))
    load_hf_weights(args, model, args.hf_checkpoint)
    return model


def plain_copy(model: Sequence[torch.nn.Module]) -> Callable[[], None]:
    sources = [param.data for chunk in model for param in chunk.parameters()]
    targets = [torch.empty_like(source).copy_(source) for source in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return copy


def gloo_alone(sizes: Sequence[int]) -> tuple[subprocess.Popen[bytes], Callable[[], None]]:
    """A process that receives buckets of these sizes, and what broadcasts them to it."""
    import torch.distributed as dist

    from slime.utils.distributed_utils import init_process_group

    url = f"tcp://127.0.0.1:{free_port()}"
    receiver = subprocess.Popen([sys.executable, __file__, "--receive", url, *map(str, sizes)], cwd=ROOT)
    group = init_process_group("gloo", url, 2, 0, f"floor of {sum(sizes)}", timedelta(seconds=120))
    memory = torch.ones(max(sizes), dtype=torch.uint8)

    def send() -> None:
        for size in sizes:
            dist.broadcast(memory[:size], src=0, group=group)
        dist.barrier(group=group)

    return receiver, send


def receive(url: str, sizes: Sequence[int]) -> NoReturn:
    """Receives buckets of these sizes, again and again."""
    import torch.distributed as dist

    from slime.utils.distributed_utils import init_process_group

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as an engine has
    group = init_process_group("gloo", url, 2, 1, f"floor of {sum(sizes)}")
    memory = torch.empty(max(sizes), dtype=torch.uint8)
    while True:
        for size in sizes:
            dist.broadcast(memory[:size], src=0, group=group)
        dist.barrier(group=group)


def changes(model: Sequence[torch.nn.Module]) -> dict[str, dict[str, float]]:
    """Takes both encodings: their part of all bytes, and bytes of weights per second both ways."""
    from slime.weight_sync.versions.codec import apply, bytes_in, difference

    exact = [param.data.float() for chunk in model for param in chunk.parameters()]
    before = [weight.bfloat16() for weight in exact]
    after = [(weight + 1e-6 * torch.randn_like(weight).sign()).bfloat16() for weight in exact]
    pairs = [(bytes_in(new), bytes_in(old)) for new, old in zip(after, before, strict=True)]
    total = sum(new.size for new, _ in pairs)
    rows = {}
    for encoding in ("xor", "overwrite"):
        start = time.perf_counter()
        found = [difference(new, old, encoding) for new, old in pairs]
        encoded = time.perf_counter() - start
        changed = [(pair, change.payload) for pair, change in zip(pairs, found, strict=True) if change]
        start = time.perf_counter()
        for (new, old), payload in changed:
            assert (apply(old, payload, encoding) == new).all()
        applied = time.perf_counter() - start
        sent = sum(len(payload) for _, payload in changed)
        rows[encoding] = {
            "share_of_bytes": sent / total,
            "encode_bytes_per_s": total / encoded,
            "apply_bytes_per_s": total / applied,
        }
    return rows


def measure(
    actions: dict[str, Callable[[], Any]], repeats: int, engine: psutil.Process, before: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Medians of each action's seconds, and of its report's if it gives one; the actions take turns.

    Args:
        before: what goes before those that write files.
    """
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in actions}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            if name in _WRITERS:
                before()
            cpu, wall = _cpu_seconds(engine), time.perf_counter()
            report = action()
            took = {"wall_s": time.perf_counter() - wall, "cpu_s": _cpu_seconds(engine) - cpu}
            if report is not None:
                took |= {"transfer_s": report.transfer, "pause_s": report.pause, "commit_s": report.commit}
            samples[name].append(took)
    return {
        name: {key: statistics.median(one[key] for one in taken[1:]) for key in taken[0]}
        for name, taken in samples.items()
    }


def _cpu_seconds(engine: psutil.Process) -> float:
    times = engine.cpu_times()
    return time.process_time() + times.user + times.system


def run(size: str, repeats: int, directory: Path) -> dict[str, Any]:
    from slime.backends.megatron_utils.hf_weights import HfWeights
    from slime.config.run import run_config
    from slime.utils.types import EngineEndpoint
    from slime.weight_sync.transports.broadcast import BroadcastTransport
    from slime.weight_sync.transports.disk import DiskTransport
    from slime.weight_sync.transports.handle import HandleTransport
    from slime.weight_sync.update import WeightUpdate

    checkpoint, versions = directory / size, count(1)
    make_checkpoint(checkpoint, size)
    written = {"update_weight_disk_dir": str(directory / "versions"), "synced_checkpoint": str(checkpoint)}
    args = make_args(checkpoint, **written)
    model = load_model(args)
    total = sum(param.nbytes for chunk in model for param in chunk.parameters())
    full, rest = divmod(total, BUCKET_BYTES)
    before, write = file_alone(total, directory)
    receiver, send = gloo_alone([BUCKET_BYTES] * full + [rest] * bool(rest))
    process, url = start_engine(checkpoint)
    try:
        weights = HfWeights(args, model)
        config = run_config(args)
        handle = WeightUpdate(config, weights, [HandleTransport(config)], writer="one")
        handle.connect([EngineEndpoint(url, None, 1, 0)])
        broadcast = WeightUpdate(config, weights, [BroadcastTransport(config)], writer="one")
        broadcast.connect([EngineEndpoint(url, None, 1, None)])
        disk = WeightUpdate(config, weights, [DiskTransport(config)], writer="one")
        disk.connect([EngineEndpoint(url, None, 1, None)])
        actions = {
            "gloo_alone": send,
            "plain_copy": plain_copy(model),
            "tensor": lambda: handle.run(next(versions)),
            "distributed": lambda: broadcast.run(next(versions)),
            "file_alone": write,
            "disk": lambda: disk.run(next(versions)),
        }
        rows = measure(actions, repeats, psutil.Process(process.pid), before)
        broadcast.disconnect()
    finally:
        for one in (process, receiver):
            one.kill()
            one.wait()
    for row in rows.values():
        row["bytes_per_s"] = total / row["wall_s"]
        row["share_of_plain_copy"] = rows["plain_copy"]["wall_s"] / row["wall_s"]
        if "commit_s" in row:
            row["pause_over_commit"] = row["pause_s"] / row["commit_s"]
    rows["tensor"]["share_of_floor"] = 2 * rows["tensor"]["share_of_plain_copy"]
    rows["distributed"]["share_of_floor"] = rows["gloo_alone"]["wall_s"] / rows["distributed"]["wall_s"]
    rows["disk"]["share_of_floor"] = rows["file_alone"]["wall_s"] / rows["disk"]["transfer_s"]
    return {"bytes": total, **rows, "changes": changes(model) if total < _CHANGED else {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M", "100M"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--receive", nargs="+", help=argparse.SUPPRESS)  # what `gloo_alone` starts
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receive:
        receive(options.receive[0], [*map(int, options.receive[1:])])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    with tempfile.TemporaryDirectory() as directory:
        from slime.backends.megatron_utils.initialize import init
        from slime.config.run import run_config
        from tests.run_args import run_args

        init(run_config(run_args(**ONE_RANK, seed=1)))
        results = {size: run(size, options.repeats, Path(directory)) for size in options.sizes}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    report = {"benchmark": "weight_sync", "time": when, "repeats": options.repeats, "sizes": results}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    for size, result in results.items():
        for name in ("plain_copy", "tensor", "gloo_alone", "distributed", "file_alone", "disk"):
            row = result[name]
            print(
                f"{size:>5} {name:<12} {row['bytes_per_s'] / 1e9:6.2f} GB/s  {row['wall_s'] * 1e3:8.1f} ms "
                f"({row['cpu_s'] * 1e3:.0f} ms CPU), {row['share_of_plain_copy']:.2f} of a plain copy"
                + (f", {row['share_of_floor']:.2f} of its floor" if "share_of_floor" in row else "")
                + (f", pause {row['pause_over_commit']:.2f} commits" if "pause_over_commit" in row else "")
            )
        for encoding, row in result["changes"].items():
            print(
                f"{size:>5} {encoding:<12} {row['share_of_bytes']:.4f} of the bytes, found "
                f"at {row['encode_bytes_per_s'] / 1e9:.2f} GB/s, made at "
                f"{row['apply_bytes_per_s'] / 1e9:.2f} GB/s"
            )


if __name__ == "__main__":
    main()
