"""Messages of ``/v1/chat/completions``: checked, and in the form that the chat template expects.

A copy of what SGLang does, also where that surprises: a final message of the assistant becomes one of the
user, unless it is to be continued.
"""

from typing import Any

import orjson

from slime.backends.embedded_engine.errors import BadRequest

ROLES = ("system", "assistant", "tool", "function", "developer", "latest_reminder", "root")
_FIELDS = ("role", "content", "name", "tool_call_id", "reasoning_content", "tool_calls")
_REFUSED = ("tools", "prefix", "phase")

Message = dict[str, Any]


def chat_messages(raw: list[Any], structured: bool) -> list[Message]:
    """Messages as the template takes them.

    Args:
        raw: as they came.
        structured: whether the template takes a list of parts; else parts are joined by a space.

    Raises:
        BadRequest: no message, an unknown role, content that is neither text nor parts of text.
    """
    if not raw:
        raise BadRequest("messages: wanted at least one, each with a role")
    return [_message(f"messages.{index}", message, structured) for index, message in enumerate(raw)]


def split_final(messages: list[Message], continues: bool) -> tuple[list[Message], str]:
    """The messages to render, and the text with which the response begins."""
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        return messages, ""
    if continues:
        return messages[:-1], last["content"]
    return [*messages[:-1], {"role": "user", "content": last["content"]}], ""


def _message(where: str, message: Any, structured: bool) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    # SGLang takes every role in any case but this one
    if not isinstance(role, str) or (role != "user" and role.lower() not in ROLES):
        raise BadRequest(
            f"{where}.role {role!r}: wanted one of user, {', '.join(ROLES)}", kind=BadRequest.BODY
        )
    if role == "user" and message.get("content") is None:
        raise BadRequest(f"{where}.content: wanted text or a list of parts", kind=BadRequest.BODY)
    refused = [name for name in _REFUSED if message.get(name)]
    if refused:
        raise BadRequest(f"{where}: not supported by the embedded engine: {', '.join(refused)}")
    given = {name: message[name] for name in _FIELDS if message.get(name) is not None}
    if "tool_calls" in given:
        given["tool_calls"] = _tool_calls(f"{where}.tool_calls", given["tool_calls"])
    return {**given, "role": role.lower(), "content": _content(where, message.get("content"), structured)}


def calls_within(raw: list[Any]) -> int:
    """How many tools the assistant has called in a conversation."""
    calls = [message.get("tool_calls") for message in raw if isinstance(message, dict)]
    return sum(len(made) for made in calls if isinstance(made, list))


def _tool_calls(where: str, raw: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as objects, which is what templates go through."""
    if not isinstance(raw, list):
        raise BadRequest(f"{where}: wanted a list", kind=BadRequest.BODY)
    calls = []
    for index, call in enumerate(raw):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"{where}.{index}: wanted an object with a function that has a name", kind=BadRequest.BODY
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments)
            except orjson.JSONDecodeError as error:
                raise BadRequest(f"{where}.{index}.function.arguments: not JSON: {error}") from error
            if not isinstance(arguments, dict):
                raise BadRequest(f"{where}.{index}.function.arguments: wanted a JSON object")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _content(where: str, content: Any, structured: bool) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: wanted text or a list of parts")
    texts = [_text(f"{where}.content.{index}", part) for index, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if structured else " ".join(texts)


def _text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise BadRequest(f"{where}: a part of type {kind!r} is not supported by the embedded engine")
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{where}.text {part.get('text')!r}: wanted a string")
    return part["text"]
