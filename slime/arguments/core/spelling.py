"""Guessing what was meant by a name that nobody knows."""

from collections.abc import Iterable
from functools import cache

_SHORTEST_PREFIX = 8


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one misspells; None where it would take more than a slip of the finger.

    A slip is one letter too many, too few, wrong or swapped with its neighbour; names of 20 letters and more
    may have two. Dashes, underscores and capitals don't count. The beginning of only one known name will do
    as well. A whole word more or less, however short, is another name: ``--lora-rank``, ``--q-lora-rank``.
    """
    wanted = _letters(name)
    slips = 0 if len(wanted) < 4 else 1 if len(wanted) < 20 else 2
    names = sorted(known)
    near = [(_distance(wanted, _letters(other), slips), other) for other in names]
    alike = [found for found in near if found[0] <= slips and not _lacks_a_word(name, found[1])]
    if alike:
        return min(alike)[1]
    longer = [other for other in names if _letters(other).startswith(wanted)]
    return longer[0] if len(longer) == 1 and len(wanted) >= _SHORTEST_PREFIX else None


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """The known name of which this is surely a misspelling, where names of one's own are legal too.

    That is: underscores put otherwise, or one slip in one word of at least four letters. A plural is a name
    of its own, as is another short word at the same place (``eval_top_n`` is not ``eval_top_k``).
    """
    return next(
        (other for other in sorted(known) if len(_letters(other)) >= 6 and _slipped(name, other)), None
    )


def _lacks_a_word(name: str, other: str) -> bool:
    """Whether one is the other but for one word."""
    shorter, longer = sorted(
        (name.lower().replace("_", "-").strip("-").split("-") for name in (name, other)), key=len
    )
    if len(longer) != len(shorter) + 1:
        return False
    return any(longer[:i] + longer[i + 1 :] == shorter for i in range(len(longer)))


def _slipped(name: str, meant: str) -> bool:
    if _letters(name) == _letters(meant):
        return True
    words, wanted = name.lower().split("_"), meant.lower().split("_")
    pairs = [(a, b) for a, b in zip(words, wanted, strict=False) if a != b]
    if len(words) != len(wanted) or len(pairs) != 1:
        return False
    word, right = pairs[0]
    return len(right) >= 4 and word != right + "s" and _distance(word, right, 1) == 1


@cache
def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


@cache
def _kinds(word: str) -> frozenset[str]:
    return frozenset(word)


def _distance(a: str, b: str, limit: int) -> int:
    """Slips between two words, by optimal string alignment; more than ``limit`` counts as ``limit + 1``."""
    if abs(len(a) - len(b)) > limit or len(_kinds(a) - _kinds(b)) > limit:  # a slip brings one letter at most
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i in range(1, len(a) + 1):
        before, above, row = row, before, [i]
        for j in range(1, len(b) + 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a[i - 1] != b[j - 1]))
            if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
        if min(row) > limit:  # no later row has fewer
            return limit + 1
    return min(row[-1], limit + 1)
