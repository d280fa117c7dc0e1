"""Which answers a parser of LaTeX reads within its time: it tries many ways for each level of brackets."""

import re

_DEEPEST = 15
_LONGEST = 2000
_MOST_BARS = 40
_CHAIN = re.compile(r"(?:\w?[-_^!]){40}|(?:!\s*[)}\]]\s*){3}|(?:\^\{?\w+\}?\s*[)}\]]\s*){4}")
"""Powers of powers, indices of indices, signs before signs; factorials of factorials, in brackets."""
_LEVEL = re.compile(r"(?P<opens>[(\[{]|\\begin\b)|(?P<closes>[)\]}]|\\end\b)")


def is_within_bounds(answer: str, gold: str) -> bool:
    """Whether an answer is no longer and no deeper than answers are; the label, if it is, may be matched."""
    if len(answer) > max(_LONGEST, 2 * len(gold)):
        return False
    if depth(answer) > max(_DEEPEST, depth(gold)):
        return False
    if answer.count("|") > max(_MOST_BARS, gold.count("|")):
        return False
    return not _CHAIN.search(answer) or bool(_CHAIN.search(gold))


def depth(text: str) -> int:
    """Levels of brackets that are open at the same time at most; what closes none counts for nothing."""
    level = deepest = 0
    for found in _LEVEL.finditer(text):
        level = level + 1 if found["opens"] else max(0, level - 1)
        deepest = max(deepest, level)
    return deepest
