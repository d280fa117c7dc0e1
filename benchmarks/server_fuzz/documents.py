"""OpenAPI documents of the servers, made of the types and tables by which they read what they are asked."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

Schema = dict[str, Any]
Document = dict[str, Any]
METHODS = frozenset({"get", "put", "post", "delete", "patch"})
TEXT: Schema = {"type": "string", "maxLength": 40}
_READERS = {"read_body", "validated"}
"""Functions of the embedded engine that make a model of a body."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_REFERENCE = "#/components/schemas/{model}"
_TOLD = {"responses": {"default": {"description": "whatever it answers"}}}


def document(
    operations: Iterable[tuple[str, str]],
    bodies: Mapping[str, Any] = {},
    parameters: Mapping[str, Sequence[Schema]] = {},
) -> Document:
    """A document.

    Args:
        operations: methods and paths.
        bodies: by path: a schema, or the type that pydantic reads the body as.
        parameters: by path, as OpenAPI has them.
    """
    adapters = {
        path: body if isinstance(body, TypeAdapter) else TypeAdapter(body)
        for path, body in bodies.items()
        if not isinstance(body, dict)
    }
    keyed = [(path, "validation", adapter) for path, adapter in adapters.items()]
    found, definitions = TypeAdapter.json_schemas(keyed, ref_template=_REFERENCE)
    schemas = {path: schema for (path, _), schema in found.items()}
    schemas |= {path: body for path, body in bodies.items() if isinstance(body, dict)}
    paths: dict[str, Any] = {}
    for method, path in operations:
        operation: Schema = {**_TOLD, "parameters": list(parameters.get(path, ()))}
        if path in schemas and method.lower() != "delete":
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schemas[path]}},
            }
        paths.setdefault(path, {})[method.lower()] = operation
    made = {
        **{"openapi": "3.1.0", "info": {"title": "server", "version": "1"}, "paths": paths},
        "components": {"schemas": definitions.get("$defs", {})},
    }
    tighten(made)
    return made


def of_fastapi(app: FastAPI, endpoints: Mapping[str, Callable[..., Any]], **more: Any) -> Document:
    """The application's own document, and the bodies that its endpoints read themselves."""
    own = app.openapi()["paths"]
    operations = [(method, path) for path, found in own.items() for method in found if method in METHODS]
    bodies = {path: model for path in own if (model := _model_of(endpoints[path])) is not None}
    parameters = {
        path: [one for operation in found.values() for one in operation.get("parameters", ())][:1]
        for path, found in own.items()
    }
    return document(operations, bodies | more.get("bodies", {}), parameters | more.get("parameters", {}))


def endpoints_of(routes: Iterable[Any]) -> dict[str, Callable[..., Any]]:
    """What answers a path: of a route whose dependency reads the body, that dependency."""
    found: dict[str, Callable[..., Any]] = {}
    for route in routes:
        if isinstance(route, APIRoute):
            reads = [one.call for one in route.dependant.dependencies if one.call is not None]
            found[route.path_format] = reads[0] if reads else route.endpoint
    return found


def _model_of(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """The model that a dependency holds, or the first that an endpoint names which reads the body itself."""
    names = inspect.getclosurevars(endpoint)
    reads = names.globals if names.globals.keys() & _READERS else {}
    for value in (*names.nonlocals.values(), *reads.values()):
        if isinstance(value, type) and issubclass(value, BaseModel):
            return value
    return None


def named(name: str, schema: Schema, place: str = "query") -> Schema:
    """A parameter."""
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def among(*known: Any) -> Schema:
    """Values that mean something; others are what schema-violating data is for."""
    return {"enum": list(known)}


def tighten(schema: Any) -> None:
    """Has nothing generated that nobody reads: other fields, and integers of hundreds of digits."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        if schema.get("type") == "integer" and not schema.keys() & _BOUNDS:
            schema |= {"minimum": -(2**31), "maximum": 2**31}
        schema.pop("default", None)
        for value in schema.values():
            tighten(value)
    elif isinstance(schema, list):
        for value in schema:
            tighten(value)
