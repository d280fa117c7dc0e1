"""A grader inside its process, with whoever runs code there caught in the act."""

import inspect
import sys
from typing import Any

from slime.rollout.rm_hub.deepscaler import text_after_reasoning
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.utils.grading.boxes import boxed_answer, extract_answer
from slime.utils.grading.instructions import CHECKS, follows_all
from slime.utils.grading.math_verify_equal import are_equal
from slime.utils.grading.sympy_equal import are_equal_under_sympy, grade_mathd_or_sympy

HERE = f"{__name__}.grade"
_ACTS = frozenset(("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.__new__"))
# What sympy makes of its own templates.
_SYMPYS_OWN = ("from sympy import *", "def monomial_")
_seen: list[str] = []
_watching = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event == "compile" and arguments[1] == "<string>":
        source = arguments[0].decode() if isinstance(arguments[0], bytes) else str(arguments[0])
        if not source.startswith(_SYMPYS_OWN) and not _importing():
            _seen.append(f"compile {source:.200}")
    elif event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        _seen.append(f"open {arguments[0]!r}")
    elif event in _ACTS:
        _seen.append(f"{event} {arguments!r:.200}")


def _importing() -> bool:
    """Whether a module is being imported, late: modules may evaluate strings of their own."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
    return False


sys.addaudithook(_watch)


def grade(grader: str, label: str, answer: str) -> list[Any]:
    """The verdict, and what was run meanwhile."""
    global _watching
    _seen.clear()
    _watching = True
    try:
        return [_GRADERS[grader](label, answer), list(_seen)]
    finally:
        _watching = False


_VALUES: dict[str, Any] = {
    **{"min_words": 1, "max_words": 3, "N": 2, "small_n": 2, "n": 2, "m": 3, "percentage": 50},
    **{"reference_text": "abcd", "options": "yes/no/maybe", "sep": "-", "keyword": "tea", "word": "tea"},
    **{"prompt_to_repeat": "Write a poem", "n_start": 0, "n_end": 1},
    **{f"keyword{i}": word for i, word in enumerate("vwxyz", 1)},
}
_ARGUMENTS = {
    name: {key: _VALUES[key] for key in list(inspect.signature(check).parameters)[1:]}
    for name, check in CHECKS.items()
}
"""What each instruction needs beside a response."""


def _instructions(label: str, answer: str) -> bool:
    """Every instruction by itself; each must come to a verdict."""
    verdicts = [follows_all(answer, [name], [given]) for name, given in _ARGUMENTS.items()]
    return any(verdicts)


def _choice(label: str, answer: str) -> bool:
    by_text = {"choices": [label, "no", "yes"]}
    return any([compute_gpqa_reward(answer, "A"), compute_gpqa_reward(answer, label, by_text)])


def _final_answer(label: str, answer: str) -> bool:
    said = (answer, f"Answer: {answer}", f"\\boxed{{{answer}}}")
    verdicts = [compute_score(text, label, strict)["acc"] for text in said for strict in (False, True)]
    return any(verdicts)


def _boxes(label: str, answer: str) -> bool:
    """What is done with a whole response before its answer is graded."""
    for text in (answer, f"</think>\\boxed{{{answer}}}", f"###Response\\fbox{{{answer}"):
        solution = text_after_reasoning(text) or text
        boxed_answer(solution), extract_answer(solution)
    return False


_GRADERS = {
    "math": are_equal,
    "math_compat": lambda label, answer: grade_mathd_or_sympy(answer, label),
    "sympy alone": are_equal_under_sympy,
    "ifbench": _instructions,
    "dapo": _final_answer,
    "f1": lambda label, answer: bool(f1_score(answer, label)[0]),
    "gpqa": _choice,
    "boxes": _boxes,
}
GRADERS = tuple(_GRADERS)
OF_REWARD = {
    **{"math": {"boxes", "math"}, "deepscaler": {"boxes", "math"}, "ifbench": {"ifbench"}, "f1": {"f1"}},
    **{name: {"boxes", "math_compat", "sympy alone"} for name in ("math_compat", "deepscaler_compat")},
    **{"dapo": {"dapo"}, "gpqa": {"gpqa"}, "random": set(), "remote_rm": set()},
}
"""Which of them a ``--rm-type`` consists of."""
