"""Values of a micro-batch's responses, from the outputs of a critic."""

from collections.abc import Mapping
from typing import Any

import torch

from slime.training.context_parallel import response_rows
from slime.training.parallel import ParallelContext


def response_values(
    outputs: torch.Tensor, batch: Mapping[str, Any], context: ParallelContext | None = None
) -> list[torch.Tensor]:
    """The value of the state before each response token: what is expected of it and those after it.

    Args:
        outputs: [1, T / cp, 1], those of the critic's head, which no temperature divides.
        batch: a micro-batch of `packed_micro_batch`.

    Returns:
        Per sample [R] float32, whole ones on every context-parallel rank.
    """
    rows = response_rows(batch, context or ParallelContext.current(), outputs.device)
    return rows.gather(outputs[0, rows.local, 0].float())
