"""The document of the embedded engine, whose bodies have fields that its models do not name."""

from typing import Any

from fastapi import FastAPI

from benchmarks.server_fuzz.documents import (
    TEXT,
    Document,
    Schema,
    among,
    document,
    endpoints_of,
    of_fastapi,
    tighten,
)
from slime.agent.adapters.openai_shapes import COMPLETION
from slime.backends.embedded_engine import sampling_params as sampling
from slime.backends.embedded_engine.grammar import wanted
from slime.backends.embedded_engine.http import (
    adapter_routes,
    control_routes,
    generate_routes,
    info_routes,
    openai_bodies,
    openai_routes,
    parsing_routes,
    session_routes,
    weight_routes,
)
from slime.backends.embedded_engine.reasoning import FORMATS as REASONING
from slime.backends.embedded_engine.tool_calls.formats import FORMATS as CALLS
from tests.backends.embedded_engine.test_fuzz import PAYLOADS

_MODULES = (
    *(generate_routes, openai_routes, parsing_routes, info_routes, control_routes, weight_routes),
    *(session_routes, adapter_routes),
)
FEW = 6
"""New tokens of an answer, as more of them find nothing new."""
VOCABULARY = 320
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": VOCABULARY - 1}}
_SOME_TOKENS: Schema = _TOKENS | {"minItems": 1, "maxItems": 30}
_STOPS: Schema = {"anyOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 3}]}
_SMALL: Schema = {"type": "integer", "minimum": 1, "maximum": 3}
_OF_MEANING: dict[str, Schema] = {
    "stop": _STOPS,
    "stop_regex": {"anyOf": [_STOPS, {"enum": ["(a+)+$", "[", "\\", ".*", "(?R)", "a{9999}"]}]},
    "stop_token_ids": _TOKENS,
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number"},
        "propertyNames": {"pattern": "^[0-9]{1,3}$"},
    },
    "top_k": {"type": "integer", "minimum": -1, "maximum": VOCABULARY + 1},
    "json_schema": among('{"type": "object"}', '{"type": "integer"}', "{"),
    "regex": among("[0-9]+", "(a|b)*", "("),
    "ebnf": among('root ::= "a" | "b"', "root ::= root"),
    "structural_tag": TEXT,
    "custom_params": {"type": "object"},
}


def sampling_schema() -> Schema:
    """Sampling parameters, by the names and bounds that the engine has for them."""
    integers = {
        name: {"type": "integer", "minimum": low, "maximum": high}
        for name, (low, high) in sampling._INTEGERS.items()
    }
    numbers = {
        name: {"type": "number", "minimum": low, "maximum": min(high, 10.0)}
        for name, (low, high) in sampling._FLOATS.items()
    }
    booleans = {name: {"type": "boolean"} for name in sampling._BOOLEANS}
    names = (*sampling._NAMES, *wanted.FIELDS, "custom_params")
    known = integers | numbers | booleans | _OF_MEANING
    assert not (missing := {*names} - known.keys()), f"no schema of {missing}"
    bounded = {"max_new_tokens": {"type": "integer", "minimum": 0, "maximum": FEW}, "n": _SMALL}
    return {
        "type": "object",
        "properties": known | bounded | {name: {} for name in sampling.UNSUPPORTED},
        "required": ["max_new_tokens"],
    }


def engine_document(app: FastAPI, model_path: str) -> Document:
    """The document of an engine that serves this checkpoint."""
    endpoints = endpoints_of(route for module in _MODULES for route in module.router.routes)
    endpoints = {path.replace(":path", ""): endpoint for path, endpoint in endpoints.items()}
    made = of_fastapi(app, endpoints)
    models = made["components"]["schemas"]
    known, passed = sampling_schema(), openai_bodies._PASSED_THROUGH
    _set(models, "GenerateBody", sampling_params=known, input_ids=_SOME_TOKENS)
    _require(models, "GenerateBody", "sampling_params", "input_ids")
    del models["GenerateBody"]["properties"]["text"]  # one of the two is wanted; completions have texts
    rows = {"type": "array", "items": _TOKENS, "maxItems": 3}
    _set(models, "DetokenizeBody", tokens={"anyOf": [_TOKENS, rows]})
    _set(models, "LoadAdapterBody", config_dict=among({"r": 4, "lora_alpha": 8}, {"r": "x"}, {}))
    for model in ("GenerateBody", "ChatBody", "CompletionBody"):
        _set(models, model, lora_path=among(None))
    through = {name: known["properties"][name] for name in passed if name in known["properties"]}
    chats = document([("post", "/")], {"/": COMPLETION})
    models |= chats["components"]["schemas"]
    chat = models["_Completion"]["properties"]
    few = {"max_tokens": known["properties"]["max_new_tokens"]}
    more = {name: chat[name] for name in ("tools", "tool_choice", "response_format")}
    _set(models, "ChatBody", **through, **few, **more, messages=chat["messages"])
    _set(models, "CompletionBody", **through, **few, prompt={"anyOf": [TEXT, _SOME_TOKENS]})
    _require(models, "ChatBody", "max_tokens")
    _require(models, "CompletionBody", "max_tokens")
    _set(models, "PauseBody", mode=among("abort", "retract", "in_place"))
    _set(models, "SelectorBody", selector=among("all", "target", "draft"))
    _set(models, "UpdateFromDiskBody", model_path=among(model_path))
    _set(models, "CheckerBody", action=among("checksum", "snapshot", "compare"))
    _set(models, "WeightByNameBody", name=among("model.norm.weight"))
    _set(models, "TagsBody", tags={"type": "array", "items": among("kv_cache", "weights")})
    _set(models, "CallsBody", tool_call_parser=among(*CALLS), tools=chat["tools"])
    _set(models, "ReasoningBody", reasoning_parser=among(*REASONING))
    some = {"type": "array", "items": among(*PAYLOADS), "minItems": 1, "maxItems": 2}
    for model in ("UpdateFromTensorBody", "LoadAdapterBody"):
        _set(
            models,
            model,
            serialized_named_tensors=some,
            load_format=among(None, "flattened_bucket", "direct"),
        )
    for model in ("UpdateFromDistributedBody", "UpdateFromSessionBody"):
        dtypes, shapes = among(["float32"], ["nn"]), among([[64]], [[-1]], [[2**62, 2**62]], [[]], [[2**40]])
        _set(models, model, names=among(["model.norm.weight"]), dtypes=dtypes, shapes=shapes)
    _set(models, "OpenSessionBody", metadata=among("", "AAAA", "A"))
    # Of two or more it waits for the others, as it should; an address of elsewhere is asked as it is given.
    _set(models, "JoinGroupBody", world_size=among(-1, 0, 1), master_address=among("127.0.0.1"))
    tighten(made)
    return made


def _set(models: dict[str, Any], model: str, **properties: Schema) -> None:
    models[model]["properties"] |= properties


def _require(models: dict[str, Any], model: str, *names: str) -> None:
    models[model]["required"] = sorted({*models[model].get("required", ()), *names})
