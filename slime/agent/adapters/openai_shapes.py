"""What is read of the bodies of OpenAI's two APIs."""

from typing import Annotated, Any, Literal, Required

from pydantic import Discriminator, Tag, TypeAdapter
from typing_extensions import TypedDict

from slime.agent.adapters.shapes import Count, Items, Some, Stop, Text

Strings = dict[str, Any]


class _Function(TypedDict, total=False):
    name: Required[str]
    description: str | None
    parameters: Strings | None


class _Tool(TypedDict, total=False):
    type: Literal["function"]
    function: Required[_Function]


class _Called(TypedDict, total=False):
    name: Required[str]
    arguments: str | Strings | None


class _Call(TypedDict):
    function: _Called


class _Message(TypedDict, total=False):
    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: Text | None
    tool_calls: Items[_Call] | None
    reasoning_content: str | None


class _Named(TypedDict):
    name: str


class _Choice(TypedDict):
    type: Literal["function"]
    function: _Named


class _Schema(TypedDict, total=False):
    schema: Strings


class _Format(TypedDict, total=False):
    type: Required[Literal["text", "json_object", "json_schema"]]
    json_schema: _Schema | None


class _StreamOptions(TypedDict, total=False):
    include_usage: bool | None


class _Common(TypedDict, total=False):
    model: str | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stream: bool | None
    metadata: Strings | None
    user: str | None
    top_logprobs: int | None


class _Completion(_Common, total=False):
    messages: Required[Some[_Message]]
    tools: Items[_Tool] | None
    tool_choice: Literal["auto", "none", "required"] | _Choice | None
    response_format: _Format | None
    stop: Stop | Items[Stop] | None
    presence_penalty: float | None
    frequency_penalty: float | None
    max_tokens: Count | None
    max_completion_tokens: Count | None
    logprobs: bool | None
    stream_options: _StreamOptions | None


class _Said(TypedDict, total=False):
    role: Required[Literal["user", "assistant", "system", "developer"]]
    content: Required[Text]


class _Thought(TypedDict):
    text: str


class _Reasoning(TypedDict, total=False):
    content: Items[_Thought] | None
    summary: Items[_Thought] | None


class _FunctionCall(TypedDict):
    name: str
    arguments: str | Strings
    call_id: str


class _Output(TypedDict):
    call_id: str
    output: Text


def _kind(item: Any) -> Any:
    return (item.get("type") or "message") if isinstance(item, dict) else item


_Item = Annotated[
    Annotated[_Said, Tag("message")]
    | Annotated[_Reasoning, Tag("reasoning")]
    | Annotated[_FunctionCall, Tag("function_call")]
    | Annotated[_Output, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message="an item of type message, reasoning, function_call or function_call_output",
    ),
]


class _OwnFunction(_Function, total=False):
    type: Required[Literal["function"]]


class _OwnChoice(TypedDict):
    type: Literal["function"]
    name: str


class _OwnFormat(TypedDict, total=False):
    type: Required[Literal["text", "json_object", "json_schema"]]
    schema: Strings | None


class _TextOptions(TypedDict, total=False):
    format: _OwnFormat | None


class _Response(_Common, total=False):
    input: Required[str | Items[_Item]]
    instructions: str | None
    tools: Items[_OwnFunction] | None
    tool_choice: Literal["auto", "none", "required"] | _OwnChoice | None
    text: _TextOptions | None
    max_output_tokens: Count | None
    previous_response_id: str | None
    include: Items[str] | None


COMPLETION, RESPONSE = TypeAdapter[Any](_Completion), TypeAdapter[Any](_Response)
