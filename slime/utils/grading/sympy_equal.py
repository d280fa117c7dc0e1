"""Equality of answers by strings and sympy: the grader of PRM800K (arXiv 2305.20050) and its descendants.

``simplify`` may take for ever: this belongs in a grading process.
"""

from sympy import simplify

from slime.utils.grading.formula import read_formula
from slime.utils.grading.mathd import grade_answer_mathd
from slime.utils.grading.prm800k import grade_by


def are_equal_under_sympy(ground_truth: str, given: str) -> bool:
    """Whether the difference of two normalised expressions simplifies to 0; not, if they are no formulas."""
    try:
        return bool(simplify(read_formula(ground_truth) - read_formula(given)) == 0)
    except MemoryError:
        raise
    except Exception:  # the model wrote it, and sympy raises whatever a formula makes it raise
        return False


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """See ``slime.utils.grading.prm800k.grade_by``."""
    return grade_by(are_equal_under_sympy, given_answer, ground_truth)


def grade_mathd_or_sympy(given_answer: str, ground_truth: str) -> bool:
    """Whether one of the two graders calls the answers equal."""
    return grade_answer_mathd(given_answer, ground_truth) or grade_answer_sympy(given_answer, ground_truth)
