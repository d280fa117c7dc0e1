"""The trainer's log-probs of a given text: what an engine with the same weights has to say of it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from slime.config.loss import LogitsConfig
from slime.training.backend import Outputs, TrainBackend
from slime.training.log_probs import response_log_probs
from slime.training.micro_batches import DataIterator, tensorize
from slime.utils.types import RolloutBatch

_PREFIX = "probe_"  # any: only passes without one record routes


def text_log_probs(config: LogitsConfig, backend: TrainBackend, tokens: Sequence[int]) -> list[float] | None:
    """Log-probs of all tokens but the first, at temperature 1. Collective over all ranks.

    Returns:
        None before the last pipeline stage.
    """
    layout = backend.parallel_config()
    # Virtual stages take as many micro-batches in turn as there are stages.
    copies = layout["microbatch_group_size_per_vp_stage"] if layout["vpp_size"] > 1 else 1
    batch = tensorize(_batch(tokens, copies), backend.device)
    data = DataIterator(batch, batch["micro_batch_indices"])
    found = backend.forward(batch, data, partial(_log_probs, config), _PREFIX).get(f"{_PREFIX}log_probs")
    return found[0].tolist() if found else None


def _batch(tokens: Sequence[int], copies: int) -> RolloutBatch:
    """A shard that is the text as a response to its first token, in micro-batches of one sample."""
    rest = len(tokens) - 1
    return {
        "tokens": [list(tokens)] * copies,
        "response_lengths": [rest] * copies,
        "total_lengths": [len(tokens)] * copies,
        "loss_masks": [[1] * rest] * copies,
        "raw_reward": [0.0] * copies,
        "partition": list(range(copies)),
        "micro_batch_indices": [[i] for i in range(copies)],
        "num_microbatches": [copies],
    }


def _log_probs(config: LogitsConfig, logits: torch.Tensor, batch: Mapping[str, Any]) -> Outputs:
    values, _ = response_log_probs(
        config, logits, batch, entropy_gradient=False, temperature=1.0, whole_vocabulary=True
    )
    return {"log_probs": values}
