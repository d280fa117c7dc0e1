"""Finding the final answer in a response. Imports nothing, so that the grading worker starts fast."""


def last_boxed_only_string(text: str) -> str | None:
    """The last ``\\boxed{...}`` or ``\\fbox{...}`` with balanced braces, command included."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    depth = 0
    for position in range(text.index("{", start), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start : position + 1]
    return None


def boxed_answer(text: str) -> str | None:
    """The content of the last box; None without a closed one."""
    box = last_boxed_only_string(text)
    return None if box is None else box[box.index("{") + 1 : -1]
