"""Which grammar a request asks for, checked before anything compiles it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from slime.backends.embedded_engine.errors import BadRequest

Kind = Literal["json", "regex", "ebnf", "structural_tag"]
FIELDS: dict[str, Kind] = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}
ANY_JSON = "$$ANY$$"
"""The schema of all JSON, as SGLang spells it."""
MAX_CHARACTERS = 1_000_000
_ONE_SCHEMA = frozenset(
    {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
_SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_SCHEMA_MAPS = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)
_NOT_ENFORCED = frozenset(
    {"contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains"}
    | {"multipleOf", "not", "then", "uniqueItems"}
)
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer"}
    | {"relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid"}
)


@dataclass(frozen=True)
class Wanted:
    """A grammar as a request gives it."""

    kind: Kind
    text: str


def wanted_grammar(raw: Mapping[str, Any]) -> Wanted | None:
    """The grammar of ``sampling_params``; an empty one is none, as in SGLang.

    Raises:
        BadRequest: it is no text, there are several, or it cannot be kept to.
    """
    given = {name: raw[name] for name in FIELDS if raw.get(name) not in (None, "")}
    for name, value in given.items():
        if not isinstance(value, str):
            raise BadRequest(f"{name}: wanted a string", kind=BadRequest.CONTRACT)
    if not given:
        return None
    if len(given) > 1:
        raise BadRequest(f"{' and '.join(given)}: wanted one of {', '.join(FIELDS)} at most")
    ((name, text),) = given.items()
    wanted = Wanted(FIELDS[name], text)
    if len(text) > MAX_CHARACTERS:
        raise not_compiled(wanted, f"{len(text)} characters (wanted: at most {MAX_CHARACTERS})")
    if "\0" in text or "\\u0000" in text:
        raise not_compiled(wanted, "NUL bytes are not allowed")
    if wanted.kind == "json" and text != ANY_JSON:
        _check_schema(wanted)
    return wanted


def not_compiled(wanted: Wanted, why: str) -> BadRequest:
    return BadRequest(f"Failed to compile {wanted.kind} grammar: {why}")


def _check_schema(wanted: Wanted) -> None:
    """Refuses what xgrammar takes and then does not hold to, as SGLang does."""
    try:
        schema = orjson.loads(wanted.text)
    except orjson.JSONDecodeError as error:
        raise not_compiled(wanted, str(error)) from error
    for pointer, part in _schemas(schema):
        ignored = sorted(_NOT_ENFORCED & set(part))
        if ignored:
            raise not_compiled(wanted, f"schema at {pointer}: {', '.join(ignored)} would be ignored")
        kinds = part.get("type")
        if kinds is not None and kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
            continue
        if "format" in part and part["format"] not in _FORMATS:
            raise not_compiled(wanted, f"schema at {pointer}: format {part['format']!r} is not known")
        groups: list[str] = [name for name in ("format", "pattern") if name in part]
        groups += ["minLength/maxLength"] if "minLength" in part or "maxLength" in part else []
        if len(groups) > 1:
            raise not_compiled(
                wanted, f"schema at {pointer}: {' and '.join(groups)} cannot be held to together"
            )


def _schemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas within a schema, each with its JSON pointer; deep ones need no deep stack."""
    left = [("#", schema)]
    while left:
        pointer, part = left.pop()
        if not isinstance(part, dict):
            continue
        yield pointer, part
        for name, value in part.items():
            if name in _ONE_SCHEMA and isinstance(value, dict):
                left.append((f"{pointer}/{name}", value))
            elif name in _SCHEMA_LISTS and isinstance(value, list):
                left += [(f"{pointer}/{name}/{index}", entry) for index, entry in enumerate(value)]
            elif name in _SCHEMA_MAPS and isinstance(value, dict):
                left += [(f"{pointer}/{name}/{key}", entry) for key, entry in value.items()]
