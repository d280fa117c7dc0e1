"""What OpenAI's two APIs have in common: whose session it is, tools, formats of answers and errors."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from slime.agent.adapters.forced import forced_call, is_set
from slime.agent.adapters.session import Refused

Tool = dict[str, Any]


def session_of(request: web.Request, body: Mapping[str, Any]) -> str:
    """The id of the session that a request belongs to."""
    if token := bearer(request):
        return token
    named = (body.get("metadata") or {}).get("session_id") or body.get("user")
    if not named:
        raise Refused(401, "no session (wanted: its id as bearer token, metadata.session_id or user)")
    return str(named)


def bearer(request: web.Request) -> str:
    """The token in the head of a request, if there is one."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def grammar(kind: str, holder: Mapping[str, Any], field: str) -> dict[str, str]:
    """Returns the engine's parameter for a format of this kind, whose schema is in ``holder``."""
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": json.dumps({"type": "object"})}
    if kind == "json_schema":
        return {"json_schema": json.dumps(holder["schema"])}
    raise ValueError(f"{field} of type {kind!r} (wanted: text, json_object or json_schema)")


def forced(
    name: str | None, tools: Sequence[Tool], tool_parser: str | None, params: Mapping[str, Any]
) -> dict[str, str]:
    """Returns the engine's parameter under which it calls a tool, that of this name if there is one.

    Raises:
        Refused: the answer has to be of a format as well, or no call can be forced.
    """
    if "json_schema" in params:
        raise Refused(400, "tool_choice: a forced call beside a format of the answer (wanted: one of them)")
    return forced_call(name, tools, tool_parser)


def check_functions(tools: Sequence[Tool]) -> None:
    """Looks at every function on offer, whether or not it is called for.

    Raises:
        ValueError: one has a name that is no text.
        Refused: it is neither true nor false whether one is strict.
    """
    for tool in tools:
        if tool.get("type") != "function":
            continue
        if not isinstance(tool["function"]["name"], str):
            raise ValueError(f"a tool's function.name is {tool['function']['name']!r} (wanted: text)")
        is_set(tool["function"], "strict", default=False)


def with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are a mapping: a template would write text as text once more."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def error_response(status: int, reason: str) -> web.Response:
    """The answer to a request that is refused."""
    return web.json_response({"error": described(status, reason)}, status=status)


def described(status: int, reason: str) -> dict[str, Any]:
    """An error as clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": reason, "type": kind, "code": None, "param": None}
