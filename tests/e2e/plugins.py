"""User code for end-to-end runs."""

import sys
from argparse import Namespace
from typing import Any

from slime.utils.types import Sample


async def token_parity_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """A reward that a random model gets half of the time, so that every run has gradients."""
    return float(sum(sample.tokens) % 2)


async def exiting_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    sys.exit(3)


async def broken_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    raise RuntimeError("this reward is broken")
