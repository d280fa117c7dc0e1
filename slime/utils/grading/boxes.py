"""Finding the final answer in a response."""


def last_boxed_only_string(string: str) -> str | None:
    """The last ``\\boxed{...}``, else the last ``\\fbox{...}``, with balanced braces, command included.

    None if it is not closed.
    """
    start = string.rfind("\\boxed")
    if start < 0:
        start = string.rfind("\\fbox")
    return None if start < 0 else _until_closed(string, start)


def _until_closed(text: str, start: int) -> str | None:
    depth = 0
    for position in range(start, len(text)):
        step = {"{": 1, "}": -1}.get(text[position], 0)
        depth += step
        if step < 0 and depth == 0:
            return text[start : position + 1]
    return None


def remove_boxed(s: str | None) -> str | None:
    """The content of ``\\boxed{...}``; None of anything else."""
    if s is None or not s.startswith("\\boxed{") or not s.endswith("}"):
        return None
    return s[len("\\boxed{") : -1]


def extract_boxed_answer(solution: str) -> str | None:
    """The content of the last ``\\boxed{...}``."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    """Extracts the answer of a whole response; None where there is no box."""
    return extract_boxed_answer(passage) if "\\boxed" in passage else None


def boxed_answer(text: str) -> str | None:
    """The content of the last box that has braces, ``\\boxed`` or ``\\fbox``; None if it is not closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    box = None if start < 0 else _until_closed(text, start)
    return None if box is None else box[box.index("{") + 1 : -1]
