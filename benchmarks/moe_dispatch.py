"""CPU seconds of the trainer's mixture-of-experts layer, forward and backward, against loops over experts.

    python benchmarks/moe_dispatch.py [--repeats 20]

One layer in float32, one process, one thread; router, dispatch, experts and combination. In turns with the
layer, on the same tokens with the same weights under autograd:

- ``loop``: for each expert its tokens are gathered, computed, weighted and added to the output;
- ``dense``: each expert computes all tokens, most of which weigh nothing.

Prints and writes JSON: median CPU seconds, and those of the layer over each loop's.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "moe_dispatch.json"
HIDDEN, WIDTH = 384, 192
# A name: experts, experts that a token is sent to, tokens.
CASES = {
    "8 experts": (8, 2, 2048),
    "64 experts": (64, 4, 2048),
    "64 experts, few tokens": (64, 4, 256),
}
DISPATCHERS = ("allgather", "alltoall")
_CLOSE = 1e-5


def loop(layer: Any, rows: torch.Tensor, top: int) -> torch.Tensor:
    """Output ``[T, hidden]`` for rows ``[T, hidden]``."""
    weights, chosen = _route(layer, rows, top)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts.local_experts):
        row, place = (chosen == number).nonzero(as_tuple=True)
        out.index_add_(0, row, _computed(expert, rows[row]) * weights[row, place, None])
    return out


def dense(layer: Any, rows: torch.Tensor, top: int) -> torch.Tensor:
    """Computes the layer by all experts for all rows."""
    weights, chosen = _route(layer, rows, top)
    experts = layer.experts.local_experts
    shares = torch.zeros(len(rows), len(experts)).scatter(1, chosen, weights)
    return sum(
        (_computed(expert, rows) * shares[:, number, None] for number, expert in enumerate(experts)),
        start=torch.zeros_like(rows),
    )


def _route(layer: Any, rows: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = F.linear(rows, layer.router.weight).softmax(-1).topk(top)
    return weights / weights.sum(-1, keepdim=True), chosen


def _computed(expert: Any, rows: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(rows, expert.linear_fc1.weight).chunk(2, -1)
    return F.linear(F.silu(gate) * up, expert.linear_fc2.weight)


def measure(rank: int, args: Namespace, tokens: int, repeats: int) -> dict[str, float]:
    """In a rank: median CPU seconds of each contender, forward and backward.

    Raises:
        AssertionError: they do not compute the same.
    """
    from slime.backends.megatron_utils.initialize import init
    from slime.backends.megatron_utils.model_provider import get_model
    from slime.config.run import run_config

    init(run_config(args))
    (model,) = get_model(run_config(args))
    layer: Any = model.train().decoder.layers[0].mlp
    rows = torch.randn(tokens, args.hidden_size, generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    top = args.moe_router_topk
    contenders: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "layer": lambda rows: layer(rows[:, None])[0][:, 0],
        "loop": lambda rows: loop(layer, rows, top),
        "dense": lambda rows: dense(layer, rows, top),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    outputs: dict[str, torch.Tensor] = {}
    for _ in range(repeats + 1):
        for name, compute in contenders.items():
            leaf = rows.clone().requires_grad_()
            layer.zero_grad(set_to_none=True)
            start = time.process_time()
            out = compute(leaf)
            out.backward(gradient)
            seconds[name].append(time.process_time() - start)
            outputs[name] = torch.stack([out.detach(), leaf.grad])  # type: ignore[list-item]
    scale = float(outputs["layer"].abs().max())
    for name in ("loop", "dense"):
        assert float((outputs["layer"] - outputs[name]).abs().max()) < _CLOSE * scale, name
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def run(repeats: int, cases: list[str]) -> dict[str, Any]:
    from tests.megatron_harness import make_args, run_ranks, save_tiny_hf

    results: dict[str, Any] = {}
    for name in cases:
        experts, top, tokens = CASES[name]
        sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_hidden_layers": 1}
        chosen = {"num_experts": experts, "num_experts_per_tok": top, "mlp_only_layers": []}
        with tempfile.TemporaryDirectory() as directory:
            save_tiny_hf(directory, "qwen3_moe", **sizes, **chosen)
            for dispatcher in DISPATCHERS:
                losses = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.0]}
                args = make_args(directory, moe_token_dispatcher_type=dispatcher, **losses)
                (seconds,) = run_ranks(measure, 1, args, tokens, repeats, timeout=600.0)
                ratio = {f"layer_over_{name}": seconds["layer"] / seconds[name] for name in ("loop", "dense")}
                results[f"{name}, {dispatcher}"] = {"seconds": seconds, "ratio": ratio}
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    found = run(options.repeats, options.cases)
    print(json.dumps(found, indent=2))
    options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
