"""``--rm-type math`` and its kin: equality of mathematical answers, judged in killable processes."""

import re
from typing import Any

from slime.config.rewards import RewardConfig
from slime.rollout.rm_hub.grading_pool import GraderError, grade_in_process
from slime.utils.grading.boxes import boxed_answer, extract_answer
from slime.utils.types import Sample

_MATH_VERIFY = "slime.utils.grading.math_verify_equal.are_equal"
_STRINGS = "slime.utils.grading.sympy_equal.grade_mathd_or_sympy"
# Integers as everybody writes them need no algebra.
_INTEGER = re.compile(r"-?[1-9][0-9]{0,14}|0")


async def grade_math(response: str, label: Any) -> float:
    """1.0 if math-verify calls the last ``\\boxed{}`` of the response equal to the label, else 0.0.

    An answer without a box is wrong.

    Raises:
        GradingFailed: the answer cannot be judged.
        GraderError: there is no label, or it is no mathematics.
    """
    gold = _label_text(label)
    answer = boxed_answer(response)
    if answer is None:
        return 0.0
    return float(await _equal((boxed_answer(gold) or gold).strip(), answer.strip()))


def equal_at_sight(gold: str, answer: str) -> bool | None:
    """What needs no algebra; None for the rest."""
    if answer == gold:
        return True
    return False if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer) else None


async def _equal(gold: str, answer: str) -> bool:
    verdict = equal_at_sight(gold, answer)
    return await grade_in_process(_MATH_VERIFY, gold, answer, remember=True) if verdict is None else verdict


async def grade_math_by_strings(response: str, label: Any) -> float:
    """1.0 if the last box equals the label by the string rules of MATH or by those of PRM800K and sympy.

    The original's ``--rm-type math``.
    """
    gold, answer = _label_text(label), extract_answer(response)
    if "\\boxed" in gold:
        gold = extract_answer(gold) or ""
    if answer is None or not gold:
        return 0.0
    return float(await grade_in_process(_STRINGS, answer, gold, remember=True))


def _label_text(label: Any) -> str:
    if label is None or not str(label).strip():
        raise GraderError("the sample has no label (--label-key)")
    return str(label)


async def score_math(args: RewardConfig, sample: Sample, response: str) -> float:
    return await grade_math(response, sample.label)


async def score_math_compat(args: RewardConfig, sample: Sample, response: str) -> float:
    return await grade_math_by_strings(response, sample.label)
