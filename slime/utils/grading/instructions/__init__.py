"""Instructions whose following can be checked by a program: those of IFBench (arXiv 2507.02833).

Written from their descriptions, so that some verdicts are not those of the published code: sentences are
split by their marks and not by NLTK's model, syllables are groups of vowels, ``words:start_verb`` goes by a
list of verbs and by endings, ``ratio:sentence_words`` also demands different words, ``format:title_case``
lets minor words be small, ``format:sub-bullets`` demands a bullet, ``repeat:repeat_span`` takes the last
index in or leaves it out, and ``format:quotes`` does not take an apostrophe for a quote.

``CHECKS`` maps the name of an instruction to a function of the response and of the instruction's own
arguments.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from slime.utils.grading.instructions import counts, formats, tasks, words
from slime.utils.grading.instructions.text import Check

CHECKS: dict[str, Check] = {
    **counts.CHECKS,
    **words.CHECKS,
    **formats.CHECKS,
    **tasks.CHECKS,
}


class LabelError(ValueError):
    """The instruction is at fault, not the response."""


def follows_all(response: str, names: Sequence[str], arguments: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether a response follows every one of these instructions; an empty one follows none.

    Raises:
        LabelError: an instruction is unknown, or its arguments are not those that it needs.
    """
    if unknown := [name for name in names if name not in CHECKS]:
        raise LabelError(f"instructions {unknown}: unknown")
    if len(names) != len(arguments):
        raise LabelError(f"{len(names)} instructions with arguments for {len(arguments)}")
    return bool(response.strip()) and all(
        _follows(response, name, given or {}) for name, given in zip(names, arguments, strict=True)
    )


def _follows(response: str, name: str, given: Mapping[str, Any]) -> bool:
    own = {key: value for key, value in given.items() if value is not None and key != "prompt"}
    try:
        return CHECKS[name](response, **own)
    except TypeError as error:
        raise LabelError(f"instruction {name} with {sorted(own)}: {error}") from error
