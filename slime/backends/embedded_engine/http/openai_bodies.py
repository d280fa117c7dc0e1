"""Bodies of the OpenAI endpoints, and how they become sampling parameters and grammars."""

from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field, model_validator

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import Body, Items

_PASSED_THROUGH = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
    "logit_bias",
    "n",
    "regex",
    "ebnf",
    "json_schema",
    "structural_tag",
    "custom_params",
)
_UNSUPPORTED = (
    "input_ids",
    "input_embeds",
    "functions",
    "suffix",
    "prediction",
    "modalities",
    "audio",
    "return_meta_info",
    "return_hidden_states",
    "return_routed_experts",
)


_NEVER_NULL = (
    *("model", "n", "stream", "min_tokens", "return_token_ids", "ignore_eos", "no_stop_trim"),
    *("skip_special_tokens", "frequency_penalty", "presence_penalty"),
)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"]


class _OpenAIBody(Body):
    """SGLang takes null for a few fields only."""

    lora_path: str | Items[str | None] | None = None
    never_null: ClassVar[tuple[str, ...]] = _NEVER_NULL

    @model_validator(mode="before")
    @classmethod
    def _refuse_nulls(cls, data: dict[str, Any]) -> dict[str, Any]:
        for name in cls.never_null:
            if name in data and data[name] is None:
                raise ValueError(f"{name} is null (wanted: a value, or without)")
        return data


class CompletionBody(_OpenAIBody):
    never_null = (
        *(*_NEVER_NULL, "max_tokens", "echo", "temperature", "top_p", "top_k", "min_p"),
        "repetition_penalty",
    )

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    model: str | None = None
    max_tokens: int | None = 16
    echo: bool | None = False
    min_tokens: int | None = 0
    return_token_ids: bool | None = False
    logprobs: Annotated[int | None, BeforeValidator(lambda v: int(v) if isinstance(v, bool) else v)] = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    rid: str | Items[str] | None = None


class ChatBody(_OpenAIBody):
    never_null = (*_NEVER_NULL, "logprobs", "continue_final_message", "return_prompt_token_ids")

    messages: Items[Any]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | Annotated[float, Field(ge=0.0, le=0.99)] | None = None
    continue_final_message: bool | None = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    min_tokens: int | None = 0
    return_token_ids: bool | None = False
    return_prompt_token_ids: bool | None = False
    rid: str | Items[str] | None = None


def sampling_params_of(
    data: dict[str, Any], body: CompletionBody | ChatBody, max_tokens: int | None
) -> dict[str, Any]:
    """The part of an OpenAI body that ``/generate`` calls sampling parameters.

    Raises:
        BadRequest: the body asks for what the embedded engine has not.
    """
    refused = [name for name in _UNSUPPORTED if data.get(name) not in (None, False, [], {}, "")]
    if refused:
        raise BadRequest(f"not supported by the embedded engine: {', '.join(refused)}")
    params = {name: data[name] for name in _PASSED_THROUGH if data.get(name) is not None}
    if body.min_tokens:
        params["min_new_tokens"] = body.min_tokens
    constraint = format_params(data.get("response_format"))
    return {**params, **constraint, "max_new_tokens": max_tokens, "sampling_seed": body.seed}


_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def format_params(given: Any) -> dict[str, str]:
    """The sampling parameter of a ``response_format``; none for text.

    Raises:
        BadRequest: it is of no known type, or lacks its schema.
    """
    if given is None:
        return {}
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in _TYPES:
        raise BadRequest(
            f"response_format.type {kind!r}: wanted one of {', '.join(_TYPES)}", kind=BadRequest.BODY
        )
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "structural_tag":
        return {"structural_tag": orjson.dumps(given).decode()}
    if kind == "json_schema":
        return {"json_schema": orjson.dumps(_schema(given)).decode()}
    return {}


def _schema(given: dict[str, Any]) -> dict[str, Any]:
    """OpenAI puts the schema within ``json_schema``; SGLang takes it beside ``type`` too."""
    named = given.get("json_schema")
    if named is None:
        named = {"name": "", "schema": given.get("schema")}
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise BadRequest(
            "response_format.json_schema: wanted an object with name and schema", kind=BadRequest.BODY
        )
    if not isinstance(named.get("schema"), dict):
        raise BadRequest("response_format.json_schema.schema: wanted an object")
    return named["schema"]
