"""Mixtures of experts of ``transformers`` models, the same for a row whatever rows are beside it."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from slime.backends.embedded_engine.linear import VECTOR_ROWS, linear, missing_rows

EXPERTS = "slime_rows"


def _experts(module: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What ``transformers`` calls: the chosen experts' outputs, weighted, ``[N, hidden]``.

    A row's sum is taken in the order of its experts' numbers.

    Args:
        rows: ``[N, hidden]``.
        chosen, weights: ``[N, top-k]``.
    """
    top = chosen.shape[-1]
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=module.num_experts).tolist()
    token, weight = order // top, weights.flatten()[order, None]
    out, inputs = torch.zeros_like(rows), rows[token]
    start = 0
    for number, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            found = _expert(module, number, inputs[part]) * weight[part]
            out.index_add_(0, token[part], found.to(out.dtype))
            start += count
    return out


def _expert(module: Any, number: int, rows: torch.Tensor) -> torch.Tensor:
    count = len(rows)
    if module.down_proj.shape[-1 if not module.is_transposed else -2] % VECTOR_ROWS:
        rows = F.pad(rows, (0, 0, 0, missing_rows(count)))
    hidden = module._apply_gate(_product(module, "gate_up_proj", number, rows))
    return _product(module, "down_proj", number, hidden)[:count]


def _product(module: Any, name: str, number: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[number]
    bias = getattr(module, f"{name}_bias")[number] if module.has_bias else None
    return linear(rows, weight.T if module.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
