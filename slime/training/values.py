"""Values of a micro-batch's responses, from the outputs of a critic."""

from collections.abc import Mapping
from typing import Any

import torch

from slime.arguments.views import TrainingView


def get_values(args: TrainingView, outputs: torch.Tensor, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """The value of the state before each response token: what is expected of it and those after it.

    Args:
        outputs: [1, T, 1], those of the critic's head, which no temperature divides.
        batch: a micro-batch of `packed_micro_batch`.

    Returns:
        Per sample [R] float32.
    """
    results, start = [], 0
    for tokens, response in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        end = start + len(tokens) - 1
        results.append(outputs[0, end - response : end, 0].float())
        start += len(tokens)
    return results
