"""Bodies of the OpenAI endpoints, and how they become sampling parameters."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.http.bodies import Body, Items
from slime.backends.embedded_engine.http.response_format import format_params

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
    "lora_path",
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
