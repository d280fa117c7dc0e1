"""User code that fails, for fault tests."""

from argparse import Namespace
from typing import Any

from slime.utils.types import Sample


async def broken_reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    raise RuntimeError("this reward is broken")
