"""Equality of answers as strings, by the normalisation of the MATH data set (arXiv 2103.03874).

The rules are those of its released evaluation code, kept to the letter where published scores depend on them.
"""

import re

_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_REMOVED = ("\n", "\\!")
_REWRITTEN = (("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"))
_REMOVED_LATER = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_UNIT = "\\text{ "
_LONGEST_NAME = 2


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Whether two answers are the same string once normalised."""
    return mathd_normalize_answer(ground_truth) == mathd_normalize_answer(given_answer)


def mathd_normalize_answer(answer: str | None) -> str | None:
    """An answer in the spelling of the MATH data set; as it was, if the rules do not fit it."""
    if answer is None:
        return None
    answer = answer.strip()
    if (match := _TEXT.search(answer)) is not None:
        answer = match.group("text").strip()
    try:
        return _strip_string(answer)
    except (IndexError, ValueError):
        return answer


def _strip_string(string: str) -> str:
    """Returns an answer without spaces, units, signs of percent and money; fractions and roots get braces.

    Raises:
        IndexError: a command at the end lacks what belongs to it.
        ValueError: more than one unit.
    """
    for removed in _REMOVED:
        string = string.replace(removed, "")
    for old, new in _REWRITTEN:
        string = string.replace(old, new)
    for removed in _REMOVED_LATER:
        string = string.replace(removed, "")
    string = _without_unit(string).replace("\\%", "")
    string = string.replace(" .", " 0.").replace("{.", "{0.")
    if not string:
        return string
    if string[0] == ".":
        string = "0" + string
    string = _without_name(string)
    string = _brace_fractions(_brace_roots(string).replace(" ", ""))
    return _fraction_of_slash("\\frac{1}{2}" if string == "0.5" else string)


def _without_unit(string: str) -> str:
    if _UNIT not in string:
        return string
    value, _unit = string.split(_UNIT)
    return value


def _without_name(string: str) -> str:
    """``x = 5`` as ``5``: one sign of equality, and at most two characters before it."""
    sides = string.split("=")
    return sides[1] if len(sides) == 2 and len(sides[0]) <= _LONGEST_NAME else string


def _brace_roots(string: str) -> str:
    head, *roots = string.split("\\sqrt")
    return head + "".join(
        "\\sqrt" + (root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}") for root in roots
    )


def _brace_fractions(string: str) -> str:
    """``\\frac12`` as ``\\frac{1}{2}``; the whole string as it was, if a fraction has a single character."""
    head, *fractions = string.split("\\frac")
    result = head
    for fraction in fractions:
        if fraction[0] != "{":
            if len(fraction) < 2:
                return string
            second = fraction[1] if fraction[1] == "{" else f"{{{fraction[1]}}}"
            fraction = f"{{{fraction[0]}}}{second}{fraction[2:]}"
        result += "\\frac" + fraction
    return result


def _fraction_of_slash(string: str) -> str:
    """``3/4`` as ``\\frac{3}{4}``, of integers as Python writes them."""
    match = re.fullmatch(r"(-?[0-9]+)/(-?[0-9]+)", string)
    if match is None or any(part != str(int(part)) for part in match.groups()):
        return string
    return "\\frac{{{}}}{{{}}}".format(*match.groups())
