"""``--rm-type deepscaler``: the boxed answer after the reasoning."""

from typing import Any

from slime.config.rewards import RewardConfig
from slime.rollout.rm_hub.math_grader import grade_math, grade_math_by_strings
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd, grade_answer_sympy
from slime.utils.types import Sample


def text_after_reasoning(response: str) -> str | None:
    """What follows the last ``</think>``, without one the first ``###Response``; None without either."""
    if "</think>" in response:
        return response.rpartition("</think>")[2]
    if "###Response" in response:
        return response.split("###Response")[1]
    return None


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 if the boxed answer after the reasoning equals the label by the original's string rules, else 0.

    For plain code, which it keeps waiting; ``--rm-type deepscaler_compat`` does the same without.
    """
    solution = text_after_reasoning(response)
    answer = None if solution is None else extract_answer(solution)
    truth = str(label)
    wanted = extract_answer(truth) if "\\boxed" in truth else truth
    if answer is None or not wanted:
        return 0
    return int(grade_answer_mathd(answer, wanted) or grade_answer_sympy(answer, wanted))


async def score(args: RewardConfig, sample: Sample, response: str) -> float:
    solution = text_after_reasoning(response)
    return 0.0 if solution is None else await grade_math(solution, sample.label)


async def score_compat(args: RewardConfig, sample: Sample, response: str) -> float:
    solution = text_after_reasoning(response)
    return 0.0 if solution is None else await grade_math_by_strings(solution, sample.label)
