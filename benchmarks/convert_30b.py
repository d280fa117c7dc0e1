"""Converts a mixture of experts of 30 billion parameters to torch_dist and back, and says what memory that
takes.

    python benchmarks/convert_30b.py [--layers 48] [--directory DIR]

Makes a checkpoint with the sizes of Qwen3-30B-A3B in --directory. Each tensor begins with some random
numbers; the rest are zeros, which are holes in the file. The two tools then run as anyone would run them,
`tools/convert_hf_to_torch_dist.py` and `tools/convert_torch_dist_to_hf.py`, one process each. Zeros are cut
out of the files that they have written, while they write the next ones, so that 60 GB need about as much
room as two of those files. Every tensor of the result is compared with the source.

Prints and writes JSON: bytes of the model, and for each direction seconds and the peak of resident memory.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "convert_30b.json"
SEED = 1
_BEGINNING = 32  # numbers
_FILES = 16

CONFIG: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"},
    **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    "tie_word_embeddings": False,
}


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of all tensors."""
    hidden, width, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", [hidden]
        for part, shape in (("q", [queries, hidden]), ("k", [keys, hidden]), ("v", [keys, hidden])):
            yield f"{layer}.self_attn.{part}_proj.weight", shape
        yield f"{layer}.self_attn.o_proj.weight", [hidden, queries]
        for part in "qk":
            yield f"{layer}.self_attn.{part}_norm.weight", [head]
        yield f"{layer}.mlp.gate.weight", [config["num_experts"], hidden]
        for expert in range(config["num_experts"]):
            for part, shape in (
                ("gate", [width, hidden]),
                ("up", [width, hidden]),
                ("down", [hidden, width]),
            ):
                yield f"{layer}.mlp.experts.{expert}.{part}_proj.weight", shape
    yield "model.norm.weight", [hidden]
    yield "lm_head.weight", [config["vocab_size"], hidden]


def write_source(path: Path, config: dict[str, Any]) -> int:
    """The checkpoint; returns the bytes of its tensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    named = list(shapes(config))
    draw = random.Random(SEED)
    weight_map, total, part = {}, 0, -(-len(named) // _FILES)
    for number in range(0, len(named), part):
        file = f"model-{number // part + 1:05d}-of-{_FILES:05d}.safetensors"
        total += _write_sparse(path / file, named[number : number + part], draw)
        weight_map |= dict.fromkeys((name for name, _ in named[number : number + part]), file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_sparse(file: Path, named: list[tuple[str, list[int]]], draw: random.Random) -> int:
    header, end = {}, 0
    for name, shape in named:
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for entry in header.values():
            stream.seek(8 + len(text) + entry["data_offsets"][0])
            values = torch.tensor([draw.gauss(0, 1) for _ in range(_BEGINNING)], dtype=torch.bfloat16)
            stream.write(values.view(torch.uint8).numpy().tobytes())
        stream.truncate(8 + len(text) + end)
    return end


def run(words: list[str], written: Path) -> dict[str, float]:
    """A tool, while the zeros of the files that it has completed in ``written`` are cut out of them."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    done: set[Path] = set()
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        files = [f for f in written.rglob("*") if f.suffix in (".distcp", ".safetensors")]
        # They are written in the order of their numbers, so that the last one is not complete yet.
        for file in sorted(files, key=_number)[: None if pid else -1]:
            if file not in done:
                subprocess.run(["fallocate", "--dig-holes", str(file)], check=False)
                done.add(file)
        if pid:
            break
        time.sleep(0.5)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with status {process.returncode}")
    return {"seconds": time.perf_counter() - start, "peak_gb": usage.ru_maxrss / 1e6}


def _number(file: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", file.name)]


def compare(source: Path, result: Path) -> int:
    """How many tensors are the same in both; raises RuntimeError at the first that is not."""
    old, new = (_index(path) for path in (source, result))
    if old.keys() != new.keys():
        raise RuntimeError(f"{sorted(old.keys() ^ new.keys())[:3]} are in one of them only")
    for name in old:
        with safe_open(old[name], "pt") as before, safe_open(new[name], "pt") as after:
            shape = before.get_slice(name).get_shape()
            if shape != after.get_slice(name).get_shape():
                raise RuntimeError(f"{name}: another shape")
            end = 1 if len(shape) > 1 else _BEGINNING
            for rows in (slice(0, end), slice(shape[0] // 2, shape[0] // 2 + end)):
                if not torch.equal(before.get_slice(name)[rows], after.get_slice(name)[rows]):
                    raise RuntimeError(f"{name}: other values")
    return len(old)


def _index(path: Path) -> dict[str, Path]:
    file = path / "model.safetensors.index.json"
    if file.is_file():
        return {name: path / each for name, each in json.loads(file.read_text())["weight_map"].items()}
    with safe_open(path / "model.safetensors", "pt") as opened:
        return dict.fromkeys(opened.keys(), path / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--experts", type=int, default=CONFIG["num_experts"])
    parser.add_argument("--vocab-size", type=int, default=CONFIG["vocab_size"])
    parser.add_argument("--directory", type=Path, help="where about 10 GB are free; default a temporary one")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        config = {**CONFIG, "num_hidden_layers": options.layers, "num_experts": options.experts}
        config["vocab_size"] = options.vocab_size
        config["num_experts_per_tok"] = min(config["num_experts_per_tok"], options.experts)
        total = write_source(work / "hf", config)
        found: dict[str, Any] = {"model_gb": total / 1e9, "parameters": total // 2, "layers": options.layers}
        words = ["--hf-checkpoint", str(work / "hf"), "--save", str(work / "saved")]
        found["to_torch_dist"] = run(["tools/convert_hf_to_torch_dist.py", *words], work / "saved")
        print(json.dumps(found), flush=True)
        words = ["--input-dir", str(work / "saved"), "--output-dir", str(work / "back")]
        words += ["--origin-hf-dir", str(work / "hf")]
        found["to_hf"] = run(["tools/convert_torch_dist_to_hf.py", *words], work / ".back.partial")
        found["same_tensors"] = compare(work / "hf", work / "back")
        found["disk_gb"] = sum(f.stat().st_blocks * 512 for f in work.rglob("*") if f.is_file()) / 1e9
    finally:
        shutil.rmtree(work)
    print(json.dumps(found, indent=2))
    options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
