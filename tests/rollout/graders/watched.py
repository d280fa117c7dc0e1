"""A grader inside its process, with whoever runs code there caught in the act."""

import contextlib
import sys
from typing import Any

from slime.utils.grading.instructions import CHECKS
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


def _instructions(label: str, answer: str) -> bool:
    """All that need nothing but the response; an error of one is a response without a verdict."""
    for check in CHECKS.values():
        with contextlib.suppress(Exception):
            check(answer)
    return False


_GRADERS = {
    "math": are_equal,
    "math_compat": lambda label, answer: grade_mathd_or_sympy(answer, label),
    "sympy alone": are_equal_under_sympy,
    "ifbench": _instructions,
}
