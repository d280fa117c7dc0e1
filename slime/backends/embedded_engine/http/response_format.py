"""``response_format`` of the OpenAI endpoints, as the grammar that it stands for."""

from typing import Any

import orjson

from slime.backends.embedded_engine.errors import BadRequest

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
