"""A request for one of OpenAI's responses, as a chat and what the engine is asked for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.agent.adapters.forced import is_set, strict_calls
from slime.agent.adapters.openai_fields import (
    Tool,
    check_functions,
    forced,
    grammar,
    top_log_probs,
    with_arguments,
)
from slime.agent.adapters.session import KeptResponse, Refused, reminder

Message = dict[str, Any]
# Of a request, by the names that the engine has for them.
_PARAMS = {
    **{"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "sampling_seed"},
    "max_output_tokens": "max_new_tokens",
}
_READ = frozenset({"model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text"})
_READ |= {"stream", "store", "previous_response_id", "metadata", "user", *_PARAMS}
_READ |= {"include", "top_logprobs"}
_LOG_PROBS = "message.output_text.logprobs"
_INCLUDED = ("reasoning.encrypted_content", _LOG_PROBS)
# Say whose request it is, to those who count or cache them: they change no answer.
_LABELS = frozenset({"prompt_cache_key", "safety_identifier", "client_metadata"})
# Change nothing with these values; there is no way to heed others. Thoughts are told in plain text, and read
# from the items that come back.
_ONLY: dict[str, tuple[Any, ...]] = {
    **{"truncation": ("disabled",), "background": (False,), "service_tier": ("auto", "default")},
    "reasoning": ({}, {"effort": None, "summary": None}),
    "stream_options": ({}, {"include_obfuscation": False}),
}


@dataclass
class ResponseRequest:
    """What a request says.

    Attributes:
        instructions: as a message; they are not kept for the request that goes on with this one.
        said: the conversation without them.
    """

    instructions: list[Message]
    said: list[Message]
    tools: list[Tool] | None
    params: dict[str, Any] = field(default_factory=dict)
    single_call: bool = False
    store: bool = True
    log_probs: bool = False
    top_log_probs: int = 0

    @property
    def messages(self) -> list[Message]:
        """All of them, with one system message in the first place, where templates want it."""
        return _system_first([*self.instructions, *self.said])


def read_request(
    body: Mapping[str, Any], tool_parser: str | None, kept: Mapping[str, KeptResponse]
) -> ResponseRequest:
    """Reads a request.

    Args:
        kept: earlier responses of the session, by their ids.

    Raises:
        Refused: it asks for something that cannot be done; the message names the field.
    """
    _check_fields(body)
    said = [*_earlier(body.get("previous_response_id"), kept)]
    said += _messages_of(body["input"])
    if not said:
        raise Refused(400, "input [] (wanted: at least one item, or previous_response_id)")
    instructions = body.get("instructions")
    choice = body.get("tool_choice")
    offered = [] if choice == "none" else [_function(tool) for tool in body.get("tools") or ()]
    check_functions(offered)
    params = {ours: body[name] for name, ours in _PARAMS.items() if body.get(name) is not None}
    params |= _format(body.get("text") or {})
    params |= _calls(choice, offered, tool_parser, params)
    return ResponseRequest(
        [{"role": "system", "content": instructions}] if instructions else [],
        said,
        offered or None,
        params,
        single_call=not is_set(body, "parallel_tool_calls", default=True),
        store=is_set(body, "store", default=True),
        log_probs=(told := _LOG_PROBS in _included(body)),
        top_log_probs=top_log_probs(body, told, f"include {_LOG_PROBS}"),
    )


def _check_fields(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if value is None or name in _READ or name in _LABELS:
            continue
        if name not in _ONLY:
            raise Refused(400, f"{name} {value!r:.200}: not supported (wanted: without)")
        if value not in _ONLY[name]:
            wanted = f"{_ONLY[name][0]!r} or without"
            raise Refused(400, f"{name} {value!r:.200}: not supported (wanted: {wanted})")


def _included(body: Mapping[str, Any]) -> Sequence[str]:
    included = body.get("include") or []
    for name in included:
        if name not in _INCLUDED:
            raise Refused(400, f"include {name!r:.200}: not supported (wanted: {' or '.join(_INCLUDED)})")
    return included


def _earlier(identity: Any, kept: Mapping[str, KeptResponse]) -> Sequence[Message]:
    if identity is None:
        return []
    if identity not in kept:
        raise Refused(
            400, f"previous_response_id {identity!r:.200}: not kept (wanted: a recent one of the session)"
        )
    return kept[identity].said


def _messages_of(given: Any) -> list[Message]:
    """The messages of an input; what the model said in one answer is one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for item in given:
        kind = item.get("type") or "message"
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": item["content"]})
        elif kind == "message":
            _answer(messages, unless=("content", "tool_calls"))["content"] = item["content"]
        elif kind == "reasoning":
            text = "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
            said = _answer(messages, unless=("content", "tool_calls", "reasoning_content"))
            said["reasoning_content"] = text
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = with_arguments({"id": item["call_id"], "type": "function", "function": function})
            _answer(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    return messages


def _answer(messages: list[Message], unless: Iterable[str] = ()) -> Message:
    """The answer that an item belongs to: the last message, or a new one."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or any(last.get(name) for name in unless):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _system_first(messages: Sequence[Message]) -> list[Message]:
    begins = next(
        (n for n, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages)
    )
    leading = [_text(message["content"]) for message in messages[:begins]]
    first = [{"role": "system", "content": "\n\n".join(leading)}] if leading else []
    rest = messages[begins:]
    return first + [
        reminder(_text(m["content"])) if m["role"] in ("system", "developer") else m for m in rest
    ]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _function(tool: Mapping[str, Any]) -> Tool:
    """A tool as chat completions have it."""
    described = {name: tool[name] for name in ("description",) if tool.get(name)}
    strict = {"strict": True} if is_set(tool, "strict", default=False) else {}
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], **described, "parameters": parameters, **strict}
    return {"type": "function", "function": function}


def _format(text: Mapping[str, Any]) -> dict[str, str]:
    for name, value in text.items():
        if name != "format" and value not in (None, "medium"):
            raise Refused(400, f"text.{name} {value!r:.200}: not supported (wanted: without)")
    wanted = text.get("format") or {"type": "text"}
    return grammar(wanted["type"], wanted, "text.format")


def _calls(
    choice: Any, offered: Sequence[Tool], tool_parser: str | None, params: Mapping[str, Any]
) -> dict[str, str]:
    """What keeps the engine to a call, or to the schemas of tools that are strict."""
    if choice in (None, "auto", "none"):
        return strict_calls(offered, tool_parser, params, "text.format")
    if choice == "required":
        return forced(None, offered, tool_parser, params)
    return forced(choice["name"], offered, tool_parser, params)
