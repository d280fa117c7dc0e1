"""``--rm-type dapo``: string equality of the normalised final answer (DAPO, arXiv 2503.14476)."""

import re
from typing import Any

from slime.rollout.rm_hub.answers import boxed_answer

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_TAIL_CHARACTERS = 300
_STRICT_TAIL_CHARACTERS = 100
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|boxed|overline)\{(.*?)\}")
_NOISE = re.compile(r"\\(?:left|right|!|,|;| )|\\?[$%]|\\circ|\^\{\\circ\}|\s+")
_UNITS = re.compile(
    r"(?i)\b(?:square|units?|degrees?|dollars?|cents?|inches|feet|meters?|cm|hours?|minutes?)\b"
)


def normalize_final_answer(answer: str) -> str:
    """The answer without spaces, wrappers, units, currency signs and thousands separators."""
    answer = answer.split("=")[-1]
    answer = _WRAPPERS.sub(r"\1", _UNITS.sub("", answer))
    answer = _NOISE.sub("", answer).replace("tfrac", "frac").replace("dfrac", "frac").rstrip(".")
    return answer.replace(",", "") if answer.replace(",", "").lstrip("-").isdigit() else answer


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """``{"score": 1.0 or -1.0, "acc": bool, "pred": str}``.

    The prediction is the last ``Answer: ...`` in the last 300 characters, or, if strict, the last box in
    the last 100 characters.
    """
    if strict_box_verify:
        prediction = boxed_answer(solution_str[-_STRICT_TAIL_CHARACTERS:])
        correct = prediction == str(ground_truth)
        return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}
    matches = _ANSWER.findall(solution_str[-_TAIL_CHARACTERS:])
    prediction = normalize_final_answer(matches[-1]) if matches else "[INVALID]"
    correct = prediction == normalize_final_answer(str(ground_truth))
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}
