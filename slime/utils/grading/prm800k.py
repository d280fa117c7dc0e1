"""The string rules of PRM800K's grader (arXiv 2305.20050), up to the question that sympy must answer.

Kept to the letter, oddities included, where published scores depend on them: an unreduced fraction is wrong,
"or" and "and" are commas, and text is compared without regard to case.
"""

import contextlib
import re
from collections.abc import Callable

from slime.utils.grading.latex_text import latex_to_text

_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month"),
    *("year", "foot", "feet", "inch", "yard"),
)
_UNIT_PATTERNS = [re.compile(rf"{unit}(es)?(s)? *(\^[0-9]+)?") for unit in _UNITS]
_REPLACED = (
    *(("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")),
    *(("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12")),
)
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_NEVER_EVALUATED = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
_MAX_LETTERS = 2
_BRACKETS = "()[]"
_WHOLE_TO = 1e-7


def grade_by(equal: Callable[[str, str], bool], given_answer: str, ground_truth: str) -> bool:
    """Whether an answer is right; tuples and intervals element by element, with the same brackets.

    Where the truth is an integer, the answer must be one; a fraction must be reduced as the truth is.

    Args:
        equal: fn(ground truth, given) for two normalised expressions that ``may_be_evaluated``.
    """
    truth, given = normalize(ground_truth), normalize(given_answer)
    if truth == given:
        return True
    if not given:
        return False
    truths, answers = split_tuple(truth), split_tuple(given)
    if len(truths) != len(answers):
        return False
    if len(truths) > 1 and (truth[0] != given[0] or truth[-1] != given[-1]):
        return False
    return bool(truths) and all(_grade_element(equal, t, a) for t, a in zip(truths, answers, strict=True))


def _grade_element(equal: Callable[[str, str], bool], truth: str, given: str) -> bool:
    if _FRACTION.search(truth) and _FRACTION.search(given):
        return truth == given
    if _is_whole(truth) != _is_whole(given):
        return False
    return may_be_evaluated(f"({truth})-({given})") and equal(truth, given)


def may_be_evaluated(expression: str) -> bool:
    """Whether an expression is short of letters and of towers of powers."""
    letters = {c for c in expression.replace("sqrt", "").replace("frac", "") if c.isalpha()}
    return len(letters) <= _MAX_LETTERS and not _NEVER_EVALUATED.search(expression)


def normalize(expression: str) -> str:
    """An answer as an expression of sympy's, as far as the rules get."""
    if (match := _TEXT.search(expression)) is not None:
        expression = match.group("text")
    for old, new in _REPLACED:
        expression = expression.replace(old, new)
    for pattern in _UNIT_PATTERNS:
        expression = pattern.sub("", expression)
    expression = re.sub(r"\^ *\\circ", "", expression)
    if expression.startswith("{") and expression.endswith("}"):
        expression = expression[1:-1]
    expression = re.sub(r",\\! *", "", expression)
    if _is_whole_float(expression):
        expression = str(round(float(expression)))
    if "\\" in expression:
        with contextlib.suppress(RecursionError):  # a thousand open braces
            expression = latex_to_text(expression)
    expression = re.sub("- *", "-", expression)
    # A mixed number is a sum.
    expression = re.sub("([0-9]) +([0-9])", r"\1+\2", expression)
    expression = expression.translate({ord(c): None for c in " {}"}).lower()
    return str(int(float(expression.replace(",", "")))) if _is_whole(expression) else expression


def split_tuple(expression: str) -> list[str]:
    """The elements of a tuple or an interval; thousands separators part nothing."""
    expression = _without_thousands(expression)
    if not expression:
        return []
    inside = expression[1:-1]
    enclosed = len(expression) > 2 and expression[0] in _BRACKETS and expression[-1] in _BRACKETS
    if enclosed and not any(bracket in inside for bracket in _BRACKETS):
        return [element.strip() for element in inside.split(",")]
    return [expression]


def _without_thousands(expression: str) -> str:
    while True:
        shorter = _THOUSANDS.sub(r"\1\3\4", expression)
        if shorter == expression:
            return shorter
        expression = shorter


def _is_whole(expression: str) -> bool:
    return _is_whole_float(_without_thousands(expression))


def _is_whole_float(text: str) -> bool:
    try:
        value = float(text)
        return abs(value - round(value)) <= _WHOLE_TO
    except (ValueError, OverflowError):  # no number, infinity, NaN
        return False
