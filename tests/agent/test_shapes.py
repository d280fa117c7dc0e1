"""Every answer that refuses a request says which field is wrong, what it holds and what is wanted."""

import json

import httpx
import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from tests.each import hold_each

GONE = object()
WRONG = (5, -1, True, "x", "", [], [5], {}, {"x": 1}, None)
SCHEMA = {"type": "object"}
CALLED = {"name": "f", "arguments": "{}"}
TEXTS = [{"type": "text", "text": "t"}]
CHAT = {
    **{"model": "m", "temperature": 0.5, "top_p": 0.5, "top_k": 5, "seed": 1, "stream": False, "n": 1},
    **{"stop": ["s"], "presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 5, "user": "s"},
    **{"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 1, "parallel_tool_calls": True},
    **{"metadata": {"session_id": "s"}, "stream_options": {"include_usage": True}},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": False}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": TEXTS},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": CALLED}]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
RESPONSE = {
    **{name: CHAT[name] for name in ("model", "temperature", "top_p", "top_k", "seed", "stream", "metadata")},
    **{"instructions": "i", "max_output_tokens": 5, "store": True, "parallel_tool_calls": True, "user": "s"},
    **{"include": ["message.output_text.logprobs"], "top_logprobs": 1, "truncation": "disabled"},
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}],
    "tool_choice": {"type": "function", "name": "f"},
    "input": [
        {"role": "user", "content": TEXTS},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": TEXTS},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ],
}
OWN_FORMAT = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
MESSAGES = {
    **{"model": "m", "temperature": 0.5, "top_p": 0.5, "top_k": 5, "stop_sequences": ["s"], "max_tokens": 5},
    **{"stream": False, "thinking": {"type": "enabled", "budget_tokens": 2000}, "system": TEXTS},
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": False}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": False},
    "messages": [
        {"role": "user", "content": TEXTS},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                *TEXTS,
                {"type": "tool_use", "id": "c", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": TEXTS, "is_error": False}],
        },
    ],
}
REQUESTS = [
    (OpenAIAdapter, "/v1/chat/completions", CHAT),
    (OpenAIAdapter, "/v1/chat/completions", {"messages": CHAT["messages"], "response_format": FORMAT}),
    (OpenAIAdapter, "/v1/responses", RESPONSE),
    (OpenAIAdapter, "/v1/responses", {"input": "q", "text": OWN_FORMAT}),
    (AnthropicAdapter, "/v1/messages", MESSAGES),
    (AnthropicAdapter, "/v1/messages/count_tokens", MESSAGES),
]


def places(value, before=()):
    """Where something stands in a body, the body itself among it."""
    yield before
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, item in entries:
        yield from places(item, (*before, key))


def changed(body, place, value):
    """The body with something else there; without it if that is ``GONE``."""
    whole = {"body": json.loads(json.dumps(body))}  # parts of it are the same objects
    *way, last = ("body", *place)
    holder = whole
    for key in way:
        holder = holder[key]
    if value is GONE:
        del holder[last]
    else:
        holder[last] = value
    return whole.get("body", {})


def shown(value):
    """What an error may say of a value: itself, what is in it, that it is not there, or what needs it."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    needed_by = (" of tools ", " without logprobs ", " without include ")
    if value is GONE:
        return [" missing ", " None ", " {'type': 'text'} ", *needed_by]
    return [" missing ", *needed_by, *(f" {part!r}" for part in [value, *inside])]


@pytest.mark.parametrize(("kind", "path", "body"), REQUESTS)
def test_what_refuses_a_request_names_the_field_and_the_value(serve_to, engine, kind, path, body):
    _, url = serve_to(kind)
    engine.answer = lambda conversation: "ok"
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer s"}, timeout=300) as client:
        assert client.post(path, json=body).status_code == 200, client.post(path, json=body).text
        cases = [(place, value) for place in places(body) for value in (*WRONG, GONE)]
        cases.remove(((), None))  # is sent as no body
        refused = []

        def check(case):
            place, value = case
            answer = client.post(path, json=changed(body, place, value))
            if answer.status_code == 200:
                return
            refused.append(place)
            assert answer.status_code == 400, answer.text
            said = answer.json()["error"]["message"]
            assert any(key in said for key in place if isinstance(key, str)) or len(place) < 2, said
            assert any(found in said for found in shown(value)) and "(wanted: " in said, said

        hold_each(cases, check, name=lambda case: f"{case[0]} {'gone' if case[1] is GONE else case[1]!r}")
    assert len(refused) > len(cases) / 4
