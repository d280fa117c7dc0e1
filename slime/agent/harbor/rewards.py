"""What a task's tests say that an answer is worth."""

import json
import math
from collections.abc import Mapping
from typing import Any


class VerifierError(RuntimeError):
    """A task's tests came to no reward, which says nothing about the answer."""


def from_json(text: str) -> dict[str, float]:
    """Returns the rewards of a ``reward.json``: an object of finite numbers, or one such number.

    Raises:
        VerifierError: it is something else.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"reward.json cannot be read: {error!s:.200}") from error
    named = found if isinstance(found, dict) else {"reward": found}
    if not named:
        raise VerifierError("reward.json has no reward")
    return {name: _finite(value, "reward.json") for name, value in named.items()}


def from_text(text: str) -> dict[str, float]:
    """Returns the reward of a ``reward.txt``: one finite number.

    Raises:
        VerifierError: it is something else.
    """
    try:
        return {"reward": _finite(float(text), "reward.txt")}
    except ValueError as error:
        raise VerifierError(f"reward.txt says {text!r:.200} (wanted: a number)") from error


def _finite(value: Any, file: str) -> float:
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise VerifierError(f"{file} says {value!r:.200} (wanted: a finite number)")


def reward_of(rewards: Mapping[str, float]) -> float:
    """Returns the number that is trained on: that named ``reward``, else the mean of all of them."""
    if "reward" in rewards:
        return rewards["reward"]
    return sum(rewards.values()) / len(rewards)
