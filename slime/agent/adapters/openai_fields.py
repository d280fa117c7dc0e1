"""What OpenAI's two APIs have in common: whose session it is, tools, formats of answers and errors."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from slime.agent.adapters.forced import forced_call, is_set
from slime.agent.adapters.session import Refused, Turn

Tool = dict[str, Any]
_MAX_TOP_LOG_PROBS = 20


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
    """Returns the engine's parameter for a format of this kind, whose schema is in ``holder``.

    Raises:
        Refused: it is not there.
    """
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": json.dumps({"type": "object"})}
    if kind == "json_schema":
        if not isinstance(holder.get("schema"), dict):
            raise Refused(400, f"{field}.schema missing (wanted: an object)")
        return {"json_schema": json.dumps(holder["schema"])}
    raise Refused(400, f"{field} {kind!r} (wanted: text, json_object or json_schema)")


def forced(
    name: str | None, tools: Sequence[Tool], tool_parser: str | None, params: Mapping[str, Any]
) -> dict[str, str]:
    """Returns the engine's parameter under which it calls a tool, that of this name if there is one.

    Raises:
        Refused: the answer has to be of a format as well, or no call can be forced.
    """
    if "json_schema" in params:
        told = "'required'" if name is None else repr(name)
        raise Refused(400, f"tool_choice {told} beside a format of the answer (wanted: one of them)")
    return forced_call(name, tools, tool_parser)


def top_log_probs(body: Mapping[str, Any], told: bool, by: str) -> int:
    """How many tokens' log-probs a request wants in the place of each.

    Args:
        told: the request wants log-probs at all, which ``by`` says.

    Raises:
        Refused: it is no such number, or no log-probs are wanted beside it.
    """
    number: int = body.get("top_logprobs") or 0
    if not 0 <= number <= _MAX_TOP_LOG_PROBS:
        raise Refused(400, f"top_logprobs {number!r} (wanted: 0 to {_MAX_TOP_LOG_PROBS})")
    if number and not told:
        raise Refused(400, f"top_logprobs {number} without {by} (wanted: both)")
    return number


def log_probs_of(turn: Turn, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """The log-prob of each token of an answer, and of others in its place if they were asked for."""

    def told(log_prob: float, token: int) -> dict[str, Any]:
        text = decode([token])
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}

    tops = turn.top_log_probs or [[] for _ in turn.log_probs]
    return [
        {**told(*pair), "top_logprobs": [told(*other) for other in top]}
        for pair, top in zip(turn.log_probs, tops, strict=True)
    ]


def check_functions(tools: Sequence[Tool]) -> None:
    """Looks at every function on offer, whether or not it is called for.

    Raises:
        Refused: it is neither true nor false whether one is strict.
    """
    for tool in tools:
        is_set(tool["function"], "strict", default=False)


def with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are a mapping: a template would write text as text once more.

    Raises:
        Refused: they are no JSON.
    """
    function = dict(call["function"])
    if not isinstance(written := function.get("arguments"), Mapping):
        try:
            function["arguments"] = json.loads(written or "{}")
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"arguments of a call {written!r:.200} (wanted: JSON; {error})") from error
    return {**call, "function": function}


def error_response(status: int, reason: str) -> web.Response:
    """The answer to a request that is refused."""
    return web.json_response({"error": described(status, reason)}, status=status)


def described(status: int, reason: str) -> dict[str, Any]:
    """An error as clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": reason, "type": kind, "code": None, "param": None}
