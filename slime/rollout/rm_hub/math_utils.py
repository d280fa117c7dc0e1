"""The original's graders of mathematical answers, under its names, for plain code.

sympy is asked in a killable process: a formula that it cannot finish raises ``GradingFailed``, and does not
hang the caller.
"""

from typing import Any

from slime.rollout.rm_hub.grading_pool import grade_and_wait
from slime.utils.grading.boxes import (
    extract_answer,
    extract_boxed_answer,
    last_boxed_only_string,
    remove_boxed,
)
from slime.utils.grading.mathd import _strip_string, grade_answer_mathd, mathd_normalize_answer
from slime.utils.grading.prm800k import grade_by

__all__ = [
    "_strip_string",
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "last_boxed_only_string",
    "mathd_normalize_answer",
    "remove_boxed",
]

_ARE_EQUAL = "slime.utils.grading.sympy_equal.are_equal_under_sympy"


def grade_answer_sympy(given_answer: str, ground_truth: str | None) -> bool:
    """Grades by the rules of PRM800K; their last resort is sympy, with a limit of ten seconds for each
    element.

    Raises:
        GradingFailed: sympy came to no verdict.
    """
    if ground_truth is None:
        return False
    return grade_by(lambda truth, given: grade_and_wait(_ARE_EQUAL, truth, given), given_answer, ground_truth)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the last boxed answer of a solution is right by the rules of MATH or of PRM800K."""
    if not ground_truth:
        return False
    truth = str(ground_truth)
    wanted = extract_answer(truth) if "\\boxed" in truth else truth
    given = extract_answer(solution_str)
    if given is None or wanted is None:
        return False
    return grade_answer_mathd(given, wanted) or grade_answer_sympy(given, wanted)
