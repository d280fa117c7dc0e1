"""Routes: which experts the engine sent each token to, from the sample to the rows of a micro-batch.

Row i of a sample's routes, [n, layers, top-k], is about the token at position i. The engine never computes
the last token that it samples, nor what is appended after its last answer: no row is about them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slime.config.model import ModelConfig
from slime.training.context_parallel import RowSplit
from slime.utils.types import RolloutBatch

NO_ROUTE = -1
"""Stands in place of a token's experts where the trainer chooses them."""


def compact(routes: Any) -> np.ndarray | None:
    """int16, for there are fewer experts than that, and routes are the largest field of a batch."""
    return None if routes is None else np.asarray(routes).astype(np.int16)


def checked_routes(model: ModelConfig, batch: RolloutBatch) -> list[np.ndarray]:
    """[n, layers, top-k] for each sample of a batch that is to be trained with the engine's routes.

    Raises:
        ValueError: there are none, or those of a sample do not fit it or the model.
    """
    if "rollout_routed_experts" not in batch:
        raise ValueError(
            "--use-rollout-routing-replay: no sample has rollout_routed_experts (wanted: "
            "return_routed_experts in every request, and append_response_tokens with the answer's meta_info)"
        )
    routes = [np.asarray(of_sample) for of_sample in batch["rollout_routed_experts"]]
    shape = (model.num_layers, model.moe_router_topk)
    routes = [of_sample if of_sample.size else of_sample.reshape(0, *shape) for of_sample in routes]
    names = batch.get("sample_indices", range(len(batch["tokens"])))
    for name, of_sample, tokens, mask in zip(
        names, routes, batch["tokens"], batch["loss_masks"], strict=True
    ):
        if problem := _problem(model, of_sample, tokens, mask):
            raise ValueError(f"--use-rollout-routing-replay: sample {name}: {problem}")
    return routes


def _problem(
    model: ModelConfig, routes: np.ndarray, tokens: Sequence[int], mask: Sequence[int]
) -> str | None:
    wanted, length = (model.num_layers, model.moe_router_topk), len(tokens)
    if routes.ndim != 3 or routes.shape[1:] != wanted:
        return f"routes of shape {list(routes.shape)}, wanted [tokens - 1, {wanted[0]}, {wanted[1]}]"
    # Up to the row that predicts the last token that is trained on.
    needed = max((i for i, counts in enumerate(mask, length - len(mask)) if counts), default=0)
    if not needed <= len(routes) < length:
        return f"routes of {len(routes)} tokens, wanted {needed} to {length - 1} for a sample of {length}"
    if routes.size and not 0 <= routes.min() <= routes.max() < model.num_experts:
        return f"experts {routes.min()} to {routes.max()}, wanted 0 to {model.num_experts - 1}"
    return None


def packed_routes(routes: Sequence[Any], split: RowSplit) -> torch.Tensor:
    """[T / cp, layers, top-k]: this rank's part of the packed row that the samples' tokens are in.

    `NO_ROUTE` for tokens without one and for padding.

    Args:
        split: its segments are the samples in order, and one of padding if there is any.
    """
    parts = []
    for sample, length in zip(routes, split.lengths, strict=False):
        rows = torch.from_numpy(np.array(sample))
        parts.append(_extended(rows, length))
    rest = sum(split.lengths) - sum(map(len, parts))
    parts.append(_extended(parts[0][:0], rest))
    return split.take(torch.cat(parts))


def _extended(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_full((length - len(rows), *rows.shape[1:]), NO_ROUTE)])
