"""User code for end-to-end runs."""

import asyncio
from argparse import Namespace
from typing import Any

from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample


async def token_parity_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """A reward that a random model gets half of the time, so that every run has gradients."""
    return float(sum(sample.tokens) % 2)


async def broken_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    raise RuntimeError("this reward is broken")


async def slow_generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Makes generation the longest part of a step, for tests that interfere with it."""
    await asyncio.sleep(2)
    return await generate(args, sample, sampling_params)
