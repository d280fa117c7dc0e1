"""Time and memory that loading a Hugging Face checkpoint takes, against reading its files.

    python benchmarks/hf_load.py [--gigabytes 1] [--repeats 5]

A random Qwen3 in bfloat16 in files of 256 MB, loaded by two Megatron ranks with tensor parallelism 2. The
contenders take turns, all finding the files in the page cache:

- `load`: both ranks fill their parameters, and wait for each other;
- `read`: one process reads all files from beginning to end into a buffer of 8 MB, which the processor's cache
  holds, so that nothing of what is read is written to memory;
- `read, two`: two processes read half of the files each so, at the same time;
- `kept`: one process reads all files into memory of their size, which it had before;
- `kept, two`: two processes read half of the files each so, at the same time.

Prints and writes JSON: median wall and CPU seconds of the rank that takes more, their ratios, and the peak of
resident memory that the model and loading it add to a rank, over the bytes of its parameters.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "hf_load.json"
_FILE_BYTES = 256 * 10**6
_BUFFER_BYTES = 8 * 2**20

CONFIG: dict[str, Any] = {
    **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"},
    **{"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 512},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"},
}


def write_checkpoint(path: Path, gigabytes: float) -> int:
    """A model of about that size; returns its bytes."""
    from safetensors.torch import save_file

    path.mkdir()
    layers = max(1, round((gigabytes * 1e9 - 4 * 32000 * 1024) / (2 * (3 * 1024 * 3072 + 3 * 1024 * 1024))))
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    parts: list[dict[str, torch.Tensor]] = [{}]
    total = 0
    for name, shape in _shapes(layers):
        tensor = torch.randn(shape).to(torch.bfloat16)
        if sum(each.nbytes for each in parts[-1].values()) + tensor.nbytes > _FILE_BYTES:
            _save(save_file, path, parts)
            parts.append({})
        parts[-1][name] = tensor
        total += tensor.nbytes
    _save(save_file, path, parts)
    return total


def _save(save_file: Callable[..., None], path: Path, parts: list[dict[str, torch.Tensor]]) -> None:
    save_file(parts[-1], path / f"part-{len(parts):05d}.safetensors", {"format": "pt"})
    parts[-1] = {}


def _shapes(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    hidden, width, head = 1024, 3072, 64
    found: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (32000, hidden)),
        ("lm_head.weight", (32000, hidden)),
        ("model.norm.weight", (hidden,)),
    ]
    layer: dict[str, tuple[int, ...]] = {
        **{"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)},
        **{"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)},
        **{"self_attn.q_proj": (16 * head, hidden), "self_attn.o_proj": (hidden, 16 * head)},
        **{"self_attn.k_proj": (8 * head, hidden), "self_attn.v_proj": (8 * head, hidden)},
        **{
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        },
    }
    for number in range(layers):
        found += [(f"model.layers.{number}.{name}.weight", shape) for name, shape in layer.items()]
    return found


def read_files(files: list[Path], part: int, parts: int, buffer: memoryview, keep: bool = False) -> None:
    """The bytes of one of ``parts`` stretches of all files, one after the other or over each other."""
    at = 0
    for file in files:
        size = file.stat().st_size
        left = size * (part + 1) // parts - size * part // parts
        with file.open("rb", buffering=0) as stream:
            stream.seek(size * part // parts)
            while left > 0:
                count = stream.readinto(buffer[at : at + min(left, _BUFFER_BYTES)])
                if not count:
                    raise OSError(f"{file}: ended {left} bytes early")
                left -= count
                at += count if keep else 0


def measure(rank: int, args: Namespace, small: Namespace, repeats: int) -> dict[str, Any]:
    """In a rank: seconds of each contender, and memory over the bytes of its parameters."""
    import torch.distributed as dist

    from slime.backends.megatron_utils.hf_weights import load_hf_weights
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model
    from slime.config.run import run_config

    init(run_config(args))
    load_hf_weights(small, get_model(run_config(small)), small.hf_checkpoint)  # imports what is late
    before = _peak_memory()
    model = get_model(run_config(args))
    files = sorted(Path(args.hf_checkpoint).glob("*.safetensors"))

    def load() -> None:
        load_hf_weights(args, model, args.hf_checkpoint)

    load()
    memory = _peak_memory() - before  # before there are buffers
    small_buffer = memoryview(bytearray(_BUFFER_BYTES))
    large_buffer = memoryview(bytearray(sum(file.stat().st_size for file in files)))
    contenders: dict[str, Callable[[], None]] = {
        "load": load,
        "read": lambda: read_files(files, 0, 1, small_buffer) if rank == 0 else None,
        "read, two": lambda: read_files(files, rank, 2, small_buffer),
        "kept": lambda: read_files(files, 0, 1, large_buffer, keep=True) if rank == 0 else None,
        "kept, two": lambda: read_files(files, rank, 2, large_buffer, keep=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):
        for name, run in contenders.items():
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            run()
            cpu[name].append(time.process_time() - start_cpu)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    own = sum(param.nbytes for chunk in model for param in chunk.parameters())
    medians = [
        {name: statistics.median(taken[1:]) for name, taken in clock.items()} for clock in (seconds, cpu)
    ]
    return {"seconds": medians[0], "cpu": medians[1], "memory": memory / own}


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(gigabytes: float, repeats: int) -> dict[str, Any]:
    from tests.megatron_harness import make_args, run_ranks, save_tiny_hf

    with tempfile.TemporaryDirectory() as directory:
        total = write_checkpoint(Path(directory) / "hf", gigabytes)
        save_tiny_hf(Path(directory) / "small", "qwen3")
        layout = {"tensor_model_parallel_size": 2, "params_dtype": torch.bfloat16, "bf16": True}
        args, small = (make_args(Path(directory) / name, **layout) for name in ("hf", "small"))
        first, second = run_ranks(measure, 2, args, small, repeats, timeout=1200.0)
    seconds, cpu = (
        {name: max(first[clock][name], second[clock][name]) for name in first[clock]}
        for clock in ("seconds", "cpu")
    )
    return {
        "bytes": total,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "ratio": {name: seconds["load"] / taken for name, taken in seconds.items() if name != "load"},
        "ratio_cpu": {name: cpu["load"] / cpu[name] for name in ("read", "kept")},
        "memory": max(first["memory"], second["memory"]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    found = run(options.gigabytes, options.repeats)
    print(json.dumps(found, indent=2))
    options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
