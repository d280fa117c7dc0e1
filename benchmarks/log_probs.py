"""Log-probs and entropies of a large vocabulary against ``log_softmax`` and ``gather`` under autograd.

    python benchmarks/log_probs.py [--rows 384] [--repeats 7]

Forward and backward of float32 logits, one thread per process, on the whole vocabulary and on halves of it
in two processes (TP 2). The other side computes ``log_softmax``, gathers, and takes the entropy of the
result, as metrics need it; "log_probs_only" leaves the entropy out. Prints and writes JSON: peak memory in
bytes per byte of logits, beyond the logits themselves, of one forward and backward in a fresh process; CPU
seconds, the least of repeats that alternate between the sides; and the ratios of ours (targets at a
vocabulary of 151,936: memory at most 0.5, time at most 1). Needs Linux.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.training.vocab_parallel import vocab_parallel_log_prob_entropy

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "log_probs.json"
VOCABULARIES = (151_936, 320)
SIDES = ("ours", "log_softmax", "log_probs_only")


class _Sum(torch.autograd.Function):
    """A sum over ranks whose gradient is that of each rank's own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        total = tensor.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def ours(logits: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    return vocab_parallel_log_prob_entropy(logits, targets, group, entropy_gradient=False)[0]


def log_probs_only(logits: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    return _gathered(_log_softmax(logits, group), targets, group)


def log_softmax(logits: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    log_p = _log_softmax(logits, group)
    with torch.no_grad():
        _Sum.apply(-(log_p.exp() * log_p).sum(-1), group)
    return _gathered(log_p, targets, group)


def _log_softmax(logits: torch.Tensor, group: Any) -> torch.Tensor:
    if group is None:
        return logits.log_softmax(-1)
    here = logits.logsumexp(-1)
    largest = here.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = _Sum.apply((here - largest).exp(), group).log() + largest
    return logits - total[:, None]


def _gathered(log_p: torch.Tensor, targets: torch.Tensor, group: Any) -> torch.Tensor:
    width = log_p.size(-1)
    local = targets - width * (dist.get_rank(group) if group is not None else 0)
    mine = (local >= 0) & (local < width)
    return _Sum.apply(log_p.gather(-1, local.where(mine, 0)[:, None])[:, 0] * mine, group)


def status_bytes(name: str) -> int:
    """A size in /proc/self/status; VmRSS is what the process has now, VmHWM the most it had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def on_rank(rank: int, rows: int, vocabulary: int, repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each side, of one of two ranks or, where no environment says so, of a single process."""
    group, logits, targets = _inputs(rank, rows, vocabulary)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(repeats):
        for side in SIDES:
            start = time.process_time()
            _forward_and_backward(side, logits, targets, group)
            seconds[side].append(time.process_time() - start)
    return seconds


def peak_on_rank(rank: int, side: str, rows: int, vocabulary: int) -> float:
    """Most bytes in use beyond those before, per byte of the logits; of a fresh process."""
    group, logits, targets = _inputs(rank, rows, vocabulary)
    _forward_and_backward(side, logits[:2], targets[:2], group)
    before = status_bytes("VmRSS")
    _forward_and_backward(side, logits, targets, group)
    return (status_bytes("VmHWM") - before) / (logits.numel() * logits.element_size())


def _inputs(rank: int, rows: int, vocabulary: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    parts, group = int(os.environ["WORLD_SIZE"]), None
    if parts > 1:
        dist.init_process_group("gloo", rank=rank, world_size=parts)
        group = dist.group.WORLD
    targets = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(rows, vocabulary // parts, generator=torch.Generator().manual_seed(rank))
    return group, logits, targets


def _forward_and_backward(side: str, logits: torch.Tensor, targets: torch.Tensor, group: Any) -> None:
    leaf = logits.detach().requires_grad_()
    globals()[side](leaf, targets, group).sum().backward()


def measure(vocabulary: int, rows: int, parts: int, repeats: int) -> dict[str, Any]:
    """Both sides on ``parts`` processes; of seconds and bytes those of the rank that needs most."""
    # Processes whose failures are told, which the tests keep.
    sys.path.insert(0, str(ROOT))
    from tests.megatron_harness import run_ranks

    seconds = run_ranks(on_rank, parts, rows, vocabulary, repeats)
    cpu = {side: max(min(rank[side]) for rank in seconds) for side in SIDES}
    peak = {side: max(run_ranks(peak_on_rank, parts, side, rows, vocabulary)) for side in SIDES}
    return {
        "rows": rows,
        "cpu_s": cpu,
        "peak_per_byte_of_logits": peak,
        "ratio_cpu": {side: cpu["ours"] / cpu[side] for side in SIDES[1:]},
        "ratio_peak": {side: peak["ours"] / peak[side] for side in SIDES[1:]},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=384, help="at the large vocabulary; as many logits elsewhere"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    elements = options.rows * max(VOCABULARIES)
    results = {
        f"vocabulary {vocabulary}, TP {parts}": measure(
            vocabulary, elements // vocabulary, parts, options.repeats
        )
        for vocabulary in VOCABULARIES
        for parts in (1, 2)
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
