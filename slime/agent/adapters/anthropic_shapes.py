"""What is read of the bodies of Anthropic's API."""

from typing import Annotated, Any, Literal, Required

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from slime.agent.adapters.shapes import Count, Items, Some, Stop


class _Text(TypedDict):
    type: Literal["text"]
    text: str


class _ToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _Thinking(TypedDict):
    type: Literal["thinking"]
    thinking: str


_Texts = str | Items[Annotated[_Text, Field(discriminator="type")]]


class _ToolResult(TypedDict, total=False):
    type: Required[Literal["tool_result"]]
    tool_use_id: Required[str]
    content: _Texts | None
    is_error: bool | None


class _User(TypedDict):
    role: Literal["user"]
    content: str | Items[Annotated[_Text | _ToolResult, Field(discriminator="type")]]


class _Assistant(TypedDict):
    role: Literal["assistant"]
    content: str | Items[Annotated[_Text | _ToolUse | _Thinking, Field(discriminator="type")]]


class _System(TypedDict):
    role: Literal["system"]
    content: _Texts


class _Tool(TypedDict, total=False):
    type: Literal["custom"] | None
    name: Required[str]
    description: str | None
    input_schema: Required[dict[str, Any]]


class _Choice(TypedDict, total=False):
    type: Required[Literal["auto", "none", "any", "tool"]]
    name: str | None


class _Thoughts(TypedDict, total=False):
    type: Required[Literal["enabled", "disabled", "adaptive"]]
    display: Literal["summarized"] | None


class _Request(TypedDict, total=False):
    model: str | None
    messages: Required[Some[Annotated[_User | _Assistant | _System, Field(discriminator="role")]]]
    system: _Texts | None
    tools: Items[_Tool] | None
    tool_choice: _Choice | None
    thinking: _Thoughts | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    stop_sequences: Items[Stop] | None
    max_tokens: Count | None
    stream: bool | None


MESSAGES = TypeAdapter[Any](_Request)
