"""The tool: it reads two integers and an operator, and can do nothing else."""

import operator
import re

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_CALL = re.compile(r"<tool_call>([0-9]{1,6})([-+*])([0-9]{1,6})</tool_call>")


def answer_call(text: str) -> str | None:
    """The result of the first tool call in what the model wrote; None without a well-formed one.

    The text is never evaluated: a model writes ``05*37`` or worse sooner or later.
    """
    match = _CALL.search(text)
    if match is None:
        return None
    left, symbol, right = match.groups()
    return str(_OPERATIONS[symbol](int(left), int(right)))
