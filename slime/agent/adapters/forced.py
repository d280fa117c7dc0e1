"""Calls of tools that a request demands: the engine holds the answer to a grammar."""

from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.adapters.session import Refused
from slime.backends.embedded_engine.tool_calls.forced import forcing_params


def forced_call(
    name: str | None, tools: Sequence[Mapping[str, Any]], tool_parser: str | None
) -> dict[str, str]:
    """Returns the engine's parameter under which it calls a tool, that of this name if there is one.

    Raises:
        Refused: there is no such tool, or no parser that would read the call.
    """
    functions = [dict(tool["function"]) for tool in tools if name in (None, tool["function"]["name"])]
    if tool_parser is None:
        raise Refused(
            400, "tool_choice: a call cannot be forced without a tool parser (wanted: auto or none)"
        )
    if not functions:
        raise Refused(400, f"tool_choice: no tool {name!r}" if name else "tool_choice: wanted tools")
    return forcing_params(tool_parser, functions, parallel=True, forced=True)
