"""What each role is asked."""

from collections.abc import Sequence

_FORM = "Reason step by step and put the final answer in \\boxed{}."


def solver_prompt(problem: str) -> str:
    return f"{problem}\n\n{_FORM}"


def rewriter_prompt(problem: str, solutions: Sequence[str]) -> str:
    return (
        f"{problem}\n\nHere are solutions of others, which may be wrong:\n\n{_numbered(solutions)}\n\n"
        f"Compare them, find their errors and write a better one. {_FORM}"
    )


def selector_prompt(problem: str, solutions: Sequence[str]) -> str:
    return (
        f"{problem}\n\nHere are candidate solutions:\n\n{_numbered(solutions)}\n\n"
        "Which is the best? End with its number in \\boxed{}."
    )


def _numbered(solutions: Sequence[str]) -> str:
    return "\n\n".join(f"Solution {number}:\n{text}" for number, text in enumerate(solutions, start=1))
