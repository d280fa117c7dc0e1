"""The reward functions that ``--rm-type`` names."""

import random
from typing import Any

from slime.arguments.groups.rewards import RM_TYPES, needs_no_grade
from slime.arguments.views import RolloutView
from slime.rollout.rm_hub.deepscaler import text_after_reasoning
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import grade_instructions
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_grader import grade_math, grade_math_by_strings
from slime.rollout.rm_hub.remote import post_to_reward_model
from slime.utils.grading.boxes import boxed_answer
from slime.utils.misc import load_function
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
    if name not in RM_TYPES:
        raise NotImplementedError(
            f"--rm-type {rm_type}: expected one of {', '.join(RM_TYPES)} (or boxed_...)"
        )
    if sample.label is None and needs_no_grade(args, rm_type):
        return 0.0
    return await load_function(RM_TYPES[name])(args, sample, response)


async def score_math(args: RolloutView, sample: Sample, response: str) -> float:
    return await grade_math(response, sample.label)


async def score_deepscaler(args: RolloutView, sample: Sample, response: str) -> float:
    solution = text_after_reasoning(response)
    return 0.0 if solution is None else await grade_math(solution, sample.label)


async def score_math_compat(args: RolloutView, sample: Sample, response: str) -> float:
    return await grade_math_by_strings(response, sample.label)


async def score_deepscaler_compat(args: RolloutView, sample: Sample, response: str) -> float:
    solution = text_after_reasoning(response)
    return 0.0 if solution is None else await grade_math_by_strings(solution, sample.label)


async def score_ifbench(args: RolloutView, sample: Sample, response: str) -> float:
    return await grade_instructions(response, sample.metadata)


async def score_dapo(args: RolloutView, sample: Sample, response: str) -> dict[str, Any]:
    return compute_score(response, sample.label)


async def score_f1(args: RolloutView, sample: Sample, response: str) -> float:
    return f1_score(response, sample.label)[0]


async def score_gpqa(args: RolloutView, sample: Sample, response: str) -> float:
    return compute_gpqa_reward(response, sample.label, sample.metadata)


async def score_random(args: RolloutView, sample: Sample, response: str) -> int:
    return random.randint(0, 1)


async def score_remotely(args: RolloutView, sample: Sample, response: str) -> Any:
    return await post_to_reward_model(args, sample, response)
