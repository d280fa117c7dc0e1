"""The trainer alone on one GPU: tokens per second, share of the peak, memory; beside transformers with SDPA.

    python benchmarks/gpu_trainer.py --size 0.6B
    python benchmarks/gpu_trainer.py --size 4B --recompute

One policy-gradient step over `--rows` packed micro-batches of 8,192 tokens, four samples of 2,048 each, of
a model with random weights. Both sides get the same tokens, each in a process of its own, one after the
other. The samples are of one length, so that transformers pads nothing and its SDPA takes its fastest
kernel: rows [4, 2048]. Ours packs them into one row. Ours keeps float32 main weights and moments (16 bytes
per parameter beside the weights and their gradients); the other side is `torch.optim.AdamW(fused=True)`
over the weights as they are, which in bfloat16 moves a third of the bytes.

MFU (Chowdhery et al. 2022, appendix B) = 3 F / (t P): F are the FLOPs of a forward pass over the step's
tokens, the backward pass counts twice that, t is the median of the measured steps in seconds, P the GPU's
peak. F counts matrix products, the output layer's among them, and causal attention, masked pairs left out
(`slime/models/flops.py`); recomputation, look-ups and the optimizer are not counted. P is that of dense
bfloat16 in the data sheet; a device that the table does not have is refused without `--peak-tflops`.

Memory is the peak that tensors took (on a GPU also what its allocator took from the device; on a CPU the
peak of the process). Prints and writes JSON: [device][size] of the results file.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "gpu" / "trainer.json"
PROMPT = 64
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# Returns the peak in GiB where a step takes it itself, which ends the count of PyTorch.
Step = Callable[[], float | None]


def peak_flops(device: str, dtype: str, given_tflops: float | None) -> float:
    """FLOP/s that a device has at most.

    Raises:
        ValueError: it is not in the table, and none is given.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    from slime.observability.gpu_use import PEAK_TFLOPS, peak_tflops

    peak = peak_tflops(device) if dtype == "bfloat16" else None
    if peak is None:
        known = ", ".join(PEAK_TFLOPS)
        raise ValueError(
            f"no peak is known for {dtype} on {device} (wanted: --peak-tflops, or one of {known})"
        )
    return peak * 1e12


def make_batch(vocabulary: int, samples: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    response = length - PROMPT
    rewards = torch.randn(samples, generator=generator).tolist()
    return {
        "tokens": torch.randint(vocabulary, (samples, length), generator=generator).tolist(),
        "response_lengths": [response] * samples,
        "loss_masks": [[1] * response] * samples,
        "rollout_mask_sums": [response] * samples,
        "rewards": rewards,
        "raw_reward": rewards,
        "truncated": [0] * samples,
        "sample_indices": [*range(samples)],
        "rollout_ids": [*range(samples)],
    }


def our_step(options: Namespace, batch: dict[str, Any]) -> Step:
    from slime.ray.train_worker import TrainWorker
    from tests.trainer_batches import split, trainer_args

    args = trainer_args(
        options.model,
        params_dtype=options.torch_dtype,
        bf16=options.dtype == "bfloat16",
        max_tokens_per_gpu=options.tokens,
        global_batch_size=len(batch["tokens"]),
        data_pad_size_multiplier=128,
        lr=1e-6,
        clip_grad=1.0,
        **(RECOMPUTED if options.recompute else {}),
    )
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, batch, worker.parallel_config())
    return lambda: worker.train_shard(0, shard)[0]["perf"].get("perf/memory_allocated_gib")


def transformers_step(options: Namespace, batch: dict[str, Any]) -> Step:
    from transformers import AutoModelForCausalLM

    from slime.utils.accelerator import local_device

    device = local_device()
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=options.torch_dtype, attn_implementation="sdpa"
    ).to(device)
    model.train()
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.98), fused=True)
    tokens, rewards = torch.tensor(batch["tokens"]), torch.tensor(batch["rewards"])
    size = options.tokens // options.length

    def step() -> None:
        optimizer.zero_grad()
        for ids, reward in zip(tokens.split(size), rewards.split(size), strict=True):
            _loss(model, ids.to(device), reward.to(device), len(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _loss(model: Any, ids: torch.Tensor, advantages: torch.Tensor, samples: int) -> torch.Tensor:
    """PPO's clipped loss of the responses, averaged over tokens, then over the step's samples."""
    logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1].float()
    targets = ids[:, PROMPT:]
    log_probs = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    ratio = (log_probs - log_probs.detach()).exp()
    losses = torch.maximum(-ratio * advantages[:, None], -ratio.clamp(0.8, 1.28) * advantages[:, None])
    return losses.mean(-1).sum() / samples


SIDES: dict[str, Callable[[Namespace, dict[str, Any]], Step]] = {
    "ours": our_step,
    "transformers": transformers_step,
}


def measure(options: Namespace) -> dict[str, Any]:
    """Seconds of each step of a side after one that warms up, and its memory; in the process of that side."""
    from benchmarks.qwen3_shapes import SHAPES
    from slime.utils.accelerator import synchronize

    batch = make_batch(
        SHAPES[options.size][-1], options.rows * options.tokens // options.length, options.length
    )
    step, seconds, peaks = SIDES[options.side](options, batch), [], []
    for _ in range(options.steps + 1):
        synchronize()
        started = time.perf_counter()
        peaks.append(step() or 0.0)
        synchronize()
        seconds.append(time.perf_counter() - started)
    memory = _peak_memory()
    memory["peak_gib"] = max(memory["peak_gib"], *peaks)
    return {"seconds": seconds[1:], "first_s": seconds[0], **memory}


def _peak_memory() -> dict[str, float]:
    if not torch.cuda.is_available():
        return {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_gib": peak / 2**30, "reserved_gib": reserved / 2**30}


def in_process(side: str, model: Path, words: list[str]) -> dict[str, Any]:
    """Measures a side in a process that has the GPU for itself.

    Returns:
        Its figures; where it failed, the exit status and nothing else.
    """
    figures = model.parent / f"{side}.json"
    command = [
        sys.executable,
        __file__,
        *words,
        "--side",
        side,
        "--model",
        str(model),
        "--output",
        str(figures),
    ]
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    status = subprocess.run(command, cwd=ROOT, env=env).returncode
    return json.loads(figures.read_text()) if status == 0 else {"exit_status": status}


def summary(options: Namespace, figures: dict[str, Any], flops: float, peak: float) -> dict[str, Any]:
    """Figures of a side, with rates; of one that failed as they are."""
    if "seconds" not in figures:
        return figures
    median = statistics.median(figures["seconds"])
    rate = 3 * flops / median
    tokens = options.rows * options.tokens
    rates = {"tokens_per_s": tokens / median, "tflops": rate / 1e12, "mfu": rate / peak}
    return {"step_s": median, **rates, **figures}


def run(options: Namespace, words: list[str]) -> dict[str, Any]:
    from benchmarks.qwen3_shapes import device_name, make_checkpoint
    from slime.models import calculate_fwd_flops, shape_from_hf_config

    peak = peak_flops(device_name(), options.dtype, options.peak_tflops)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_checkpoint(model, options.size, options.torch_dtype)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        shape = shape_from_hf_config(model)
        args = Namespace(**shape, padded_vocab_size=shape["vocab_size"])
        lengths = [options.length] * (options.rows * options.tokens // options.length)
        flops = calculate_fwd_flops(lengths, args)
        found = {}
        for side in options.sides:
            found[side] = in_process(side, model, words)
            print(side, json.dumps(found[side]), flush=True)  # the next one may not come to its end
    result = {side: summary(options, figures, flops, peak) for side, figures in found.items()}
    report: dict[str, Any] = {
        "dtype": options.dtype,
        "tokens_per_micro_batch": options.tokens,
        "micro_batches": options.rows,
        "recomputed": options.recompute,
        "torch": torch.__version__,
        "peak_tflops": peak / 1e12,
        **result,
    }
    rates = [side.get("tokens_per_s") for side in result.values()]
    if len(rates) == len(SIDES) and all(rates):
        report["ratio"] = result["ours"]["tokens_per_s"] / result["transformers"]["tokens_per_s"]
    return report


def parse(words: list[str]) -> Namespace:
    from benchmarks.qwen3_shapes import DTYPES, SHAPES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", choices=SHAPES, default="0.6B", help="shape of the model")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--recompute", action="store_true", help="compute layers again for their gradients")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample, a divisor of --tokens")
    parser.add_argument("--rows", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--peak-tflops", type=float, help="of the device, where the table does not have it")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.length <= PROMPT or options.tokens % options.length:
        parser.error(f"--length {options.length}: wanted a divisor of --tokens above {PROMPT}")
    options.torch_dtype = DTYPES[options.dtype]
    return options


def main(argv: Sequence[str] | None = None) -> None:
    words = [*(sys.argv[1:] if argv is None else argv)]
    options = parse(words)
    if options.side:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        options.output.write_text(json.dumps(measure(options)))
        return
    from benchmarks.qwen3_shapes import device_name

    try:
        report = run(options, words)
    except ValueError as error:
        sys.exit(f"error: {error}")
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    name = f"{options.size}, recomputed" if options.recompute else options.size
    results.setdefault(device_name(), {})[name] = report
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
