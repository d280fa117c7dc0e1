"""The reward functions that ``--rm-type`` names."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

from slime.arguments.views import RolloutView
from slime.rollout.rm_hub.answers import boxed_answer
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_grader import grade_math
from slime.rollout.rm_hub.remote import post_to_reward_model
from slime.utils.types import Sample

_BOXED_PREFIX = "boxed_"


async def score_by_type(args: RolloutView, sample: Sample, rm_type: str | None) -> Any:
    """Score a sample by a named type; ``boxed_<type>`` scores the content of its last ``\\boxed{}``.

    Raises:
        NotImplementedError: no such type, or none given.
    """
    name = (rm_type or "").strip()
    response = sample.response
    if name.startswith(_BOXED_PREFIX):
        name = name.removeprefix(_BOXED_PREFIX)
        response = boxed_answer(response) or ""
    if name not in _SCORERS:
        raise NotImplementedError(
            f"--rm-type {rm_type}: expected one of {', '.join(_SCORERS)} (or boxed_...)"
        )
    return await _SCORERS[name](args, sample, response)


async def _math(args: RolloutView, sample: Sample, response: str) -> float:
    return await grade_math(response, sample.label)


async def _deepscaler(args: RolloutView, sample: Sample, response: str) -> float:
    for marker in ("</think>", "###Response"):
        if marker in response:
            return await grade_math(response.rpartition(marker)[2], sample.label)
    return 0.0


async def _dapo(args: RolloutView, sample: Sample, response: str) -> dict[str, Any]:
    return compute_score(response, sample.label)


async def _f1(args: RolloutView, sample: Sample, response: str) -> float:
    return f1_score(response, sample.label)[0]


async def _gpqa(args: RolloutView, sample: Sample, response: str) -> float:
    return compute_gpqa_reward(response, sample.label, sample.metadata)


async def _random(args: RolloutView, sample: Sample, response: str) -> int:
    return random.randint(0, 1)


async def _remote(args: RolloutView, sample: Sample, response: str) -> Any:
    return await post_to_reward_model(args, sample, response)


_SCORERS: dict[str, Callable[[RolloutView, Sample, str], Awaitable[Any]]] = {
    "math": _math,
    "deepscaler": _deepscaler,
    "dapo": _dapo,
    "f1": _f1,
    "gpqa": _gpqa,
    "random": _random,
    "remote_rm": _remote,
}
RM_TYPES = tuple(_SCORERS)
