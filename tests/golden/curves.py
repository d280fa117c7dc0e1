"""Curves of the trainer: three rollouts that were recorded once, in every layout and with every loss.

    python -m tests.golden.curves --write          # after a change that is meant to change numbers
    python -m tests.golden.curves --exact FILE     # curves written by another checkout on this machine

``curves.json`` holds every metric of every step, and digests of the trained weights. A refactoring leaves
them equal to the last bit on one machine; between machines, whose processors round differently, they agree
within 1e-5.
"""

import argparse
import functools
import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.golden.model import save_golden_model
from tests.golden.trainer import train_recorded
from tests.megatron_harness import run_ranks

HERE = Path(__file__).parent
CURVES = HERE / "curves.json"
ROLLOUTS = HERE / "rollouts" / "{rollout_id}.pt"

COMMON = [
    *("--fp32", "--num-gpus-per-node", 8, "--seed", 7, "--load-debug-rollout-data", ROLLOUTS),
    *(
        "--num-rollout",
        3,
        "--rollout-batch-size",
        4,
        "--n-samples-per-prompt",
        4,
        "--rollout-max-response-len",
        12,
    ),
    *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 128, "--lr", 3e-4, "--lr-decay-style", "constant"),
    # With its usual epsilon Adam would make full steps of gradients that are rounding errors.
    *("--weight-decay", 0.01, "--adam-eps", 1e-6, "--global-batch-size", 8, "--eps-clip", 0.05),
]
_KL = ("--use-kl-loss", "--kl-loss-coef", 0.1)
_TP2 = ("--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2)
_PP2 = ("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2)
_DP2 = ("--actor-num-gpus-per-node", 2)
# Everything whose numbers a layout could change, at once.
_RICH = (
    *(*_KL, "--kl-loss-type", "k3", "--entropy-coef", 0.01, "--use-tis", "--use-rollout-entropy"),
    *("--eps-clip-high", 0.08, "--ref-update-interval", 2),
)

CASES: dict[str, tuple[int, tuple[object, ...]]] = {
    "grpo": (1, ()),
    "grpo, one step per rollout": (1, ("--global-batch-size", 16)),
    "grpo, everything": (1, _RICH),
    "grpo, everything, TP 2": (2, (*_RICH, *_TP2)),
    "grpo, everything, TP 2 with SP": (2, (*_RICH, *_TP2, "--sequence-parallel")),
    "grpo, everything, PP 2": (2, (*_RICH, *_PP2)),
    "grpo, everything, DP 2": (2, (*_RICH, *_DP2)),
    "grpo, DP 2, overlapped and balanced": (
        2,
        (
            *(*_DP2, "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", 20_000),
            *("--balance-data", "--balance-by-flops"),
        ),
    ),
    "grpo, static micro-batches": (1, ("--micro-batch-size", 2)),
    "grpo, per token, k2": (1, ("--calculate-per-token-loss", *_KL, "--kl-loss-type", "k2")),
    "grpo, unbiased low_var_kl": (1, (*_KL, "--kl-loss-type", "low_var_kl", "--use-unbiased-kl")),
    "grpo, engine log-probs, dual clip": (1, ("--use-rollout-logprobs", "--eps-clip-c", 3.0)),
    "grpo without std, opsm": (
        1,
        ("--disable-grpo-std-normalization", "--use-opsm", "--opsm-delta", 1e-6, "--use-rollout-logprobs"),
    ),
    "gspo": (1, ("--advantage-estimator", "gspo", "--eps-clip", 3e-4, "--eps-clip-high", 4e-4)),
    "cispo": (1, ("--advantage-estimator", "cispo", "--use-rollout-logprobs")),
    "reinforce++, discounted": (
        1,
        (
            *("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages", "--kl-coef", 0.05),
            *("--gamma", 0.9),
        ),
    ),
    "reinforce++ baseline, DP 2": (
        2,
        (
            *("--advantage-estimator", "reinforce_plus_plus_baseline", "--normalize-advantages"),
            *("--kl-coef", 0.05, *_DP2),
        ),
    ),
    "icepop": (
        1,
        (
            "--use-tis",
            "--custom-tis-function-path",
            "slime.utils.ppo_utils.icepop_function",
            "--tis-clip-low",
            0.9,
        ),
    ),
    "sft": (
        1,
        ("--loss-type", "sft_loss", "--disable-compute-advantages-and-returns", "--log-probs-chunk-size", 32),
    ),
}


def compute(model: str, name: str) -> dict[str, Any]:
    """``{"steps": metrics of each optimizer step, "rollouts": of each rollout, "weights": digests}``."""
    world_size, flags = CASES[name]
    base = [
        flag
        for flag in COMMON
        if "--micro-batch-size" not in flags or flag not in ("--use-dynamic-batch-size",)
    ]
    argv = [str(word) for word in (*base, "--actor-num-gpus-per-node", 1, "--hf-checkpoint", model, *flags)]
    results = run_ranks(train_recorded, world_size, argv, 3)
    (main,) = [result for result in results if result["steps"]]
    digest = hashlib.sha256("".join(result["sha256"] for result in results).encode()).hexdigest()
    norm = sum(result["square_sum"] for result in results) ** 0.5
    return {"steps": main["steps"], "rollouts": main["rollouts"], "weight_norm": norm, "sha256": digest}


def compute_all(progress: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    curves = {}
    with tempfile.TemporaryDirectory() as directory:
        model = save_golden_model(Path(directory))
        for name in CASES:
            curves[name] = compute(model, name)
            if progress:
                print(name, flush=True)
    return curves


@functools.cache
def recorded() -> dict[str, Any]:
    return json.loads(CURVES.read_text())


def differences(
    found: Any, wanted: Any, path: str = "", relative: float = 0.0, absolute: float = 0.0
) -> list[str]:
    """One line per leaf that differs by more than the tolerance."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        lines = [f"{path}: {sorted(wanted.keys() ^ found.keys())}"] if wanted.keys() != found.keys() else []
        for key in wanted.keys() & found.keys():
            lines += differences(found[key], wanted[key], f"{path}/{key}", relative, absolute)
        return lines
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = zip(found, wanted, strict=True)
        return [
            line
            for i, (f, w) in enumerate(pairs)
            for line in differences(f, w, f"{path}[{i}]", relative, absolute)
        ]
    if isinstance(wanted, float) and isinstance(found, float):
        equal = abs(found - wanted) <= max(absolute, relative * abs(wanted))
    else:
        equal = found == wanted
    return [] if equal else [f"{path}: found {found}, wanted {wanted}"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="replace curves.json")
    parser.add_argument("--output", type=Path, help="write the curves to this file")
    parser.add_argument("--exact", type=Path, help="compare with this file, to the last bit")
    args = parser.parse_args(argv)
    curves = compute_all(progress=True)
    for path in [args.output, CURVES if args.write else None]:
        if path is not None:
            path.write_text(json.dumps(curves, indent=1, sort_keys=True) + "\n")
    if args.exact:
        lines = differences(curves, json.loads(args.exact.read_text()))
        print("\n".join(lines) or "equal to the last bit")
        raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
