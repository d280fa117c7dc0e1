"""What a JSON schema says of a value, as far as reading text as that value needs it."""

from collections.abc import Iterable
from typing import Any

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_DEEPEST = 50


def properties_of(schema: Any, depth: int = 0) -> dict[str, Any]:
    """Schemas of an object's properties, those of alternatives included if it has none of its own."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return {}
    if isinstance(schema.get("properties"), dict):
        return schema["properties"]
    found: dict[str, Any] = {}
    for name in ("anyOf", "oneOf", "allOf"):
        for part in _list(schema.get(name)):
            found = {**properties_of(part, depth + 1), **found}
    return found


def kind_of(schema: Any, depth: int = 0) -> str | None:
    """The type of a value; of alternatives that differ, text before all others."""
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return None
    given = schema.get("type")
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given:
        return next((str(kind) for kind in given if kind != "null"), "string")
    kinds = [
        k for part in _list(schema.get("anyOf") or schema.get("oneOf")) if (k := kind_of(part, depth + 1))
    ]
    if kinds:
        return _common(kinds)
    if isinstance(schema.get("enum"), list):
        names = {_NAMES.get(type(value), "null") for value in schema["enum"]}
        return names.pop() if len(names) == 1 else "string"
    if isinstance(schema.get("allOf"), list):
        parts = (kind_of(part, depth + 1) for part in schema["allOf"])
        return next((kind for kind in parts if kind and kind != "string"), "string")
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else None


def _common(kinds: Iterable[str]) -> str:
    kinds = list(kinds)
    others = {kind for kind in kinds if kind != "null"}
    if len(others) == 1 and len(set(kinds)) <= 2:
        return others.pop()
    return "string" if "string" in kinds else kinds[0]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
