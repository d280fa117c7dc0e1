"""What a model asks for in its text: to run code, or to be done. Nothing is evaluated here."""

import json
import re

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_TAGS = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_FENCE = re.compile(r"```(?:python|py)\s*\n(.*?)```", re.DOTALL)
_ANSWER = re.compile(r"Answer:\s*\\boxed\{")
ENDS_OF_CODE = ("</code>", "</tool_call>")
"""Strings at which generation stops, so that the result follows the call at once."""


def find_code(text: str) -> str | None:
    """The code of a call of ``code_interpreter``, else in code tags, else in a fence; None without one."""
    for call in _TOOL_CALL.findall(text):
        try:
            request = json.loads(call)
            if request["name"] == "code_interpreter":
                return str(request["arguments"]["code"])
        except (ValueError, KeyError, TypeError):
            continue
    for pattern in (_TAGS, _FENCE):
        if found := pattern.findall(text):
            return _without_fence(found[-1])
    return None


def _without_fence(code: str) -> str:
    """Models write a fence inside of the tags, too."""
    match = _FENCE.search(code)
    return (match[1] if match else code).strip("\n")


def has_answer(text: str) -> bool:
    """Whether the model gives its answer, ``Answer: \\boxed{...}``."""
    return _ANSWER.search(text) is not None


def render_result(result: str) -> str:
    """How the model sees what its code wrote."""
    return f"\n\n<interpreter>\n{result}\n</interpreter>\n\n"


INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to execute code, I should put the code between <code> and "
    "</code>. If I want to give the final answer, I should use the format 'Answer: \\boxed{answer}'. "
    "Let me try again.\n"
)
