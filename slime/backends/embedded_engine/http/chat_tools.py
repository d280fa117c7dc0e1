"""The tools of a chat: checked, and what they mean for prompt and response."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jsonschema

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.tool_calls.base import ToolFormat, Tools
from slime.backends.embedded_engine.tool_calls.forced import forced_format, forcing_params
from slime.backends.embedded_engine.tool_calls.formats import FORMATS

_CHOICES = ("auto", "required", "none")


@dataclass(frozen=True)
class ToolUse:
    """``choice`` is one of auto, required and none, or the only function that is to be called."""

    tools: tuple[dict[str, Any], ...]
    choice: str | dict[str, str]
    parallel: bool

    @property
    def active(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    @property
    def forced(self) -> bool:
        return self.active and self.choice != "auto"

    @cached_property
    def callable(self) -> tuple[dict[str, Any], ...]:
        """The tools that may be called, as the template gets them."""
        if not isinstance(self.choice, dict):
            return self.tools if self.active else ()
        return tuple(t for t in self.tools if t["function"]["name"] == self.choice["name"])

    @property
    def functions(self) -> Tools:
        return {tool["function"]["name"]: tool["function"] for tool in self.callable}

    def format(self, parser: str | None) -> ToolFormat | None:
        """How calls are found in the response; None if they are not looked for."""
        if not self.active:
            return None
        return forced_format(parser) if self.forced else FORMATS.get(parser or "")

    def params(self, parser: str | None) -> dict[str, str]:
        """The grammar that the choice of a tool is."""
        if not self.active or (parser is None and not self.forced):
            return {}
        functions = [tool["function"] for tool in self.callable]
        return forcing_params(parser, functions, self.parallel, self.forced)


def tool_use(data: dict[str, Any]) -> ToolUse:
    """The tools of a body.

    Raises:
        BadRequest: a tool that is none, or a choice that there is not.
    """
    raw = data.get("tools") or []
    if not isinstance(raw, list):
        raise BadRequest("tools: wanted a list", kind=BadRequest.BODY)
    tools = tuple(_tool(f"tools.{index}", tool) for index, tool in enumerate(raw))
    choice = _choice(data.get("tool_choice"), tools)
    parallel = data.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise BadRequest("parallel_tool_calls: wanted a boolean", kind=BadRequest.BODY)
    return ToolUse(tools, choice, parallel)


def _tool(where: str, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: wanted an object with a function that has a name", kind=BadRequest.BODY)
    parameters = function.get("parameters")
    if parameters is not None:
        try:
            jsonschema.Draft202012Validator.check_schema(parameters)
        except jsonschema.SchemaError as error:
            raise BadRequest(f"{where}.function.parameters: no JSON schema: {error.message}") from error
        except RecursionError as error:
            raise BadRequest(f"{where}.function.parameters: nested too deeply") from error
        if not isinstance(parameters, dict):
            raise BadRequest(f"{where}.function.parameters: wanted an object")
    return {**tool, "type": tool.get("type", "function")}


def _choice(choice: Any, tools: tuple[dict[str, Any], ...]) -> str | dict[str, str]:
    if choice is None:
        return "auto" if tools else "none"
    function = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        if function["name"] not in [tool["function"]["name"] for tool in tools]:
            raise BadRequest(f"tool_choice: no tool is called {function['name']!r}")
        return {"name": function["name"]}
    if choice not in _CHOICES:
        raise BadRequest(
            f"tool_choice {choice!r}: wanted one of {', '.join(_CHOICES)}, or a function",
            kind=BadRequest.BODY,
        )
    if choice == "required" and not tools:
        raise BadRequest("tool_choice required: wanted tools")
    return choice
