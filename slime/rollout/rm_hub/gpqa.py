"""``--rm-type gpqa``: multiple choice, judged by the letter."""

import re
from collections.abc import Mapping
from typing import Any

_PATTERNS = (
    r"(?i)\\boxed\{\s*(?:\\text\{)?\s*\(?([A-Z])\)?\s*\}?\s*\}",
    r"(?i)(?:final answer|answer|option|choice)\s*(?:is|:)?\s*\**\(?([A-Z])\)?(?![A-Za-z])",
)


def compute_gpqa_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 if the last letter that the response settles on is the label, else 0.0.

    Args:
        label: a letter, or the text or the index of a choice in ``metadata["choices"]``.
        metadata: may hold ``choices`` (texts, in letter order) and ``valid_letters`` (default A-D, or one
            per choice).
    """
    metadata = metadata or {}
    choices = metadata.get("choices") or []
    letters = [str(x).upper() for x in metadata.get("valid_letters") or "ABCDEFGHIJ"[: len(choices) or 4]]
    wanted = _label_letter(label, choices, letters)
    text = response.rpartition("</think>")[2]
    for pattern in _PATTERNS:
        found = [letter.upper() for letter in re.findall(pattern, text) if letter.upper() in letters]
        if found:
            return float(found[-1] == wanted)
    return 0.0


def _label_letter(label: Any, choices: list[str], letters: list[str]) -> str:
    if isinstance(label, int):
        return letters[label]
    text = str(label).strip()
    if text.upper() in letters:
        return text.upper()
    if text in choices:
        return letters[choices.index(text)]
    raise ValueError(f"label {label!r} is neither one of the letters {letters} nor of the choices {choices}")
