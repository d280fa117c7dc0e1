"""User code for end-to-end runs."""

import asyncio
import os
import sys
from argparse import Namespace
from typing import Any

from slime.utils.types import Sample

GATE = "SLIME_TEST_GATE"
"""``NUMBER:PATH,...``: samples from this number on wait until the file is there."""


async def token_parity_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """A reward that a random model gets half of the time, so that every run has gradients."""
    return float(sum(sample.tokens) % 2)


async def waiting_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Scores behind a gate, so that a test finds its run under way, however late it looks."""
    for entry in os.environ[GATE].split(","):
        first, _, gate = entry.partition(":")
        while (sample.index or 0) >= int(first) and not os.path.exists(gate):
            await asyncio.sleep(0.05)
    return await token_parity_reward(args, sample)


async def exiting_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    sys.exit(3)


async def broken_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    raise RuntimeError("this reward is broken")


def perturb_a_tensor(args: Namespace) -> None:
    """Engines get one tensor otherwise than the trainer has it."""
    from slime.weight_sync.plan import WeightPlan

    filtered = WeightPlan.filtered

    def perturbed(self: WeightPlan, buckets: Any) -> Any:
        for bucket in filtered(self, buckets):
            yield [(name, tensor * 2 if name == PERTURBED else tensor) for name, tensor in bucket]

    WeightPlan.filtered = perturbed  # type: ignore[method-assign]


PERTURBED = "model.layers.1.self_attn.v_proj.weight"


async def own_task_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Which part of the answer is even ids, or odd ones: what one task wants, the other does not."""
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    odd = sum(token % 2 for token in answer) / max(len(answer), 1)
    return odd if sample.metadata["task"] == "odd" else 1 - odd
