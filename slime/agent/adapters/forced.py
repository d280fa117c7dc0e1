"""What requests demand of calls of tools, as parameters of the engine: that there is one, or no second."""

from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.adapters.session import Refused
from slime.agent.parsing import CALL_ENDS
from slime.backends.embedded_engine.tool_calls.forced import forcing_params


def forced_call(
    name: str | None, tools: Sequence[Mapping[str, Any]], tool_parser: str | None
) -> dict[str, str]:
    """Returns the engine's parameter under which it calls a tool, that of this name if there is one.

    Raises:
        Refused: there is no such tool, or no parser that would read the call.
    """
    functions = [dict(tool["function"]) for tool in tools if name in (None, tool["function"]["name"])]
    told = "a call" if name is None else repr(name)
    if tool_parser is None:
        raise Refused(400, f"tool_choice {told} without a tool parser (wanted: auto or none)")
    if not functions:
        offered = ", ".join(tool["function"]["name"] for tool in tools)
        raise Refused(400, f"tool_choice {told} of tools {offered or '[]'} (wanted: one that is on offer)")
    return forcing_params(tool_parser, functions, parallel=True, forced=True)


def strict_calls(
    tools: Sequence[Mapping[str, Any]], tool_parser: str | None, params: Mapping[str, Any], beside: str
) -> dict[str, str]:
    """Returns the engine's parameter under which calls of strict tools follow their schemas.

    Args:
        beside: the field by which a request asks for a format of the answer, for the message.

    Raises:
        Refused: there is no parser that would read the calls, or the answer has to be of a format as well.
    """
    functions = [dict(tool["function"]) for tool in tools if tool.get("type") == "function"]
    if not any(is_set(function, "strict", default=False) for function in functions):
        return {}
    if tool_parser is None:
        raise Refused(400, "strict true without a tool parser (wanted: false or without)")
    if "json_schema" in params:
        raise Refused(400, f"strict true of a tool beside {beside} (wanted: one of them)")
    return forcing_params(tool_parser, functions, parallel=True, forced=False)


def is_set(holder: Mapping[str, Any], field: str, default: bool) -> bool:
    """Whether a request has set this field.

    Raises:
        Refused: to something else than true or false.
    """
    value = holder.get(field)
    if value is not None and not isinstance(value, bool):
        raise Refused(400, f"{field} {value!r:.200} (wanted: true or false)")
    return default if value is None else value


def ended_by_call(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters under which an answer ends with its first call of a tool.

    So there is no second one to be left out of what the agent is told, and every token that was sampled is
    trained on and is there in the next turn.
    """
    stop = sampling.get("stop") or []
    return {**sampling, "stop": [*([stop] if isinstance(stop, str) else stop), CALL_ENDS]}
