"""``--rm-type gpqa``: multiple choice, judged by the letter, else by the text of the choice."""

import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.config.rewards import RewardConfig
from slime.utils.types import Sample

# Possessive where blanks may end in two ways: a long row of them must not be tried in all of them.
_ANSWERS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\\boxed\{\s*+(?:\\text\{\s*+)?\(?([A-Z])\)?\s*+(?:\}\s*+)?\}",
        r"(?:answer|option|choice)\s*+(?:(?:is|:)\s*+)?\**+\(?([A-Z])\)?(?![A-Za-z])",
        r"\b([A-Z])\)?\**\s+is\s+(?:the\s+)?correct",
    )
)
_LONE_CAPITAL = re.compile(r"\b([A-Z])\b")
DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:8])
_SHORTEST_INSIDE_A_WORD = 3


def compute_gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 if the response settles on the right choice, else 0.0.

    What counts is the last letter in a box, else after "answer", "option" or "choice", else before "is
    correct", else the last capital that stands alone. A response without a letter is right if it holds the
    text of the right choice, or a label that is neither letter nor choice.

    Args:
        label: a letter, the text of a choice, the index of one from 0, or the text of the answer.
        metadata: may hold ``choices`` (texts in letter order, or a mapping from letter to text),
            ``valid_letters`` (default one per choice, else A-H) and ``correct_letter``, which wins over the
            label.

    Raises:
        ValueError: there is neither a label nor a correct letter.
    """
    if response is None:
        return 0.0
    question = _Question.of(label, metadata or {})
    text = response.rpartition("</think>")[2]
    chosen = _last_letter(text, question.letters)
    if chosen and question.right_letter:
        return float(chosen == question.right_letter)
    return float(any(_holds(text, wanted) for wanted in question.right_texts))


def _extract_letter_from_response(response: str, valid_letters: Iterable[str]) -> str | None:
    """The letter on which a response settles, its reasoning left out; the original's name."""
    return _last_letter(response.rpartition("</think>")[2], [letter.upper() for letter in valid_letters])


@dataclass(frozen=True)
class _Question:
    letters: list[str]
    right_letter: str | None
    right_texts: list[str]

    @classmethod
    def of(cls, label: Any, metadata: Mapping[str, Any]) -> "_Question":
        choices = metadata.get("choices") or []
        texts = [str(text) for text in (choices.values() if isinstance(choices, Mapping) else choices)]
        letters = [str(x).strip().upper() for x in _letters(metadata.get("valid_letters"), choices)]
        right = metadata.get("correct_letter")
        if right is None and label is None:
            raise ValueError("the sample has no label (--label-key), nor correct_letter in its metadata")
        letter = right.strip().upper() if isinstance(right, str) else _letter_of(label, letters, texts)
        of_letter = dict(zip(letters, texts, strict=False))
        right_texts = [of_letter[letter]] if letter in of_letter else []
        if isinstance(label, str) and label.strip().upper() not in letters:
            right_texts.append(label)
        return cls(letters, letter, right_texts)


def _letters(valid: Any, choices: Any) -> list[Any]:
    if valid:
        return list(valid)
    return list(choices) if isinstance(choices, Mapping) else list(_letters_of(len(choices)))


def _letters_of(count: int) -> str:
    return string.ascii_uppercase[:count] if count else "".join(DEFAULT_VALID_LETTERS)


def _letter_of(label: Any, letters: list[str], texts: list[str]) -> str | None:
    if isinstance(label, int | float) and not isinstance(label, bool):
        return letters[int(label)] if 0 <= label < len(letters) else None
    text = str(label).strip()
    if text.upper() in letters:
        return text.upper()
    same = [letter for letter, choice in zip(letters, texts, strict=False) if _plain(choice) == _plain(text)]
    return same[0] if len(same) == 1 else None


def _last_letter(text: str, letters: list[str]) -> str | None:
    for pattern in (*_ANSWERS, _LONE_CAPITAL):
        found = [letter.upper() for letter in pattern.findall(text) if letter.upper() in letters]
        if found:
            return found[-1]
    return None


def _holds(text: str, wanted: str) -> bool:
    """Whether the words of one text are in another; numbers and short words as a whole only."""
    plain, target = _plain(text), _plain(wanted)
    if len(target) >= _SHORTEST_INSIDE_A_WORD and not target.replace(" ", "").isdigit():
        return target in plain
    return bool(target) and f" {target} " in f" {plain} "


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


async def score(args: RewardConfig, sample: Sample, response: str) -> float:
    return compute_gpqa_reward(response, sample.label, sample.metadata)
