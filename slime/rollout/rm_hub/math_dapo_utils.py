"""``--rm-type dapo``: string equality of the normalised final answer (DAPO, arXiv 2503.14476).

Answers are normalised as in Minerva (arXiv 2206.14858, appendix D.1): to the letter, since published scores
depend on it.
"""

import re
from typing import Any

from slime.config.rewards import RewardConfig
from slime.utils.grading.boxes import boxed_answer
from slime.utils.types import Sample

ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"
_TAIL_CHARACTERS = 300
_STRICT_TAIL_CHARACTERS = 100
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals"),
    *("edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}"),
    *("\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;"),
    *(",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>"),
)
_UNWRAPPED = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


def normalize_final_answer(final_answer: str) -> str:
    """An answer without words, units, wrappers and thousands separators, after its last sign of equality."""
    answer = final_answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for removed in _REMOVED:
        answer = answer.replace(removed, "")
    for pattern, new in _UNWRAPPED:
        answer = pattern.sub(new, answer)
    answer = answer.replace("$", "")
    return (answer.replace(",", "") if answer.replace(",", "").isdigit() else answer).strip()


def last_boxed_only_string(string: str) -> str | None:
    """The last ``\\boxed{...}`` with balanced braces, command included."""
    answer = boxed_answer(string[string.rfind("\\boxed{") :]) if "\\boxed{" in string else None
    return None if answer is None else f"\\boxed{{{answer}}}"


def remove_boxed(s: str) -> str:
    """The content of ``\\boxed{...}``.

    Raises:
        AssertionError: it is something else.
    """
    assert s.startswith("\\boxed{") and s.endswith("}"), f"{s!r:.80} is no \\boxed{{...}}"
    return s[len("\\boxed{") : -1]


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER_PATTERN
) -> tuple[bool, str]:
    """Whether what follows the last ``Answer:`` is the truth, and what it is once normalised."""
    matches = re.findall(answer_pattern, solution_str)
    prediction = normalize_final_answer(matches[-1] if matches else "[INVALID]")
    if gt_need_extract:
        gt = remove_boxed(last_boxed_only_string(gt) or gt)
    return prediction == normalize_final_answer(str(gt)), prediction


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: list[int] | None = None
) -> tuple[int, str | None]:
    """1 or -1 as the last box of the last 100 characters is the truth letter by letter, and its content.

    Args:
        pause_tokens_index: four positions; the last 100 characters are those before the last one and all
            after it.
    """
    start = pause_tokens_index[-1] - _STRICT_TAIL_CHARACTERS if pause_tokens_index else None
    box = last_boxed_only_string(pred[-_STRICT_TAIL_CHARACTERS if start is None else max(start, 0) :])
    answer = None if box is None else remove_boxed(box)
    return (1 if answer == gt else -1), answer


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> tuple[bool, str | None]:
    """Whether a solution is right, by its ``Answer:`` or, if strict, by its box; and its answer."""
    if strict_box_verify:
        verdict, prediction = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return verdict == 1, prediction
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """``{"score": 1.0 or -1.0, "acc": bool, "pred": str}``, of the last 300 characters."""
    tail = solution_str[-_TAIL_CHARACTERS:]
    correct, prediction = verify(tail, str(ground_truth), strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}


async def score(args: RewardConfig, sample: Sample, response: str) -> dict[str, Any]:
    return compute_score(response, sample.label)
