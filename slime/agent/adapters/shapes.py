"""Whether the body of a request has the shape that its API says, and what is told of one that has not."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from slime.agent.adapters.session import Refused

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""One wrong entry is told of, not each."""
Some = Annotated[list[T], Field(fail_fast=True, min_length=1)]
Count = Annotated[int, Field(ge=1)]
Stop = Annotated[str, Field(min_length=1)]
_SHOWN = 200
_WANTED = {
    **{"string_type": "text", "bool_type": "true or false", "int_type": "a whole number"},
    **{"float_type": "a number", "list_type": "a list", "dict_type": "an object", "missing": "it"},
    **{"string_too_short": "at least {min_length} character", "too_short": "at least {min_length}"},
    **{
        "greater_than_equal": "at least {ge}",
        "literal_error": "{expected}",
        "model_attributes_type": "an object",
    },
    **{"union_tag_invalid": "{expected_tags}", "union_tag_not_found": "an object with it"},
}
"""By the names that pydantic has for its errors."""
_TAGS = ("union_tag_invalid", "union_tag_not_found")


def _with_text(part: Any) -> Any:
    if isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str)):
        return part
    if isinstance(part, dict) and part.get("type") in (None, "text"):
        raise PydanticCustomError("part", "{wanted}", {"wanted": "one with a text"})
    raise PydanticCustomError("part", "{wanted}", {"wanted": "of type text"})


Part = Annotated[Any, AfterValidator(_with_text)]
"""A part of a message. What is no text, an image for instance, would be missing in what the model reads."""
Text = str | Items[Part]


def check(shape: TypeAdapter[Any], body: Any) -> None:
    """Looks at all of a request that is read later: types are not coerced, and other fields let through.

    Raises:
        Refused: something is of another type or missing; it is named, with the value found.
    """
    try:
        shape.validate_python(body, strict=True)
    except ValidationError as error:
        raise Refused(400, _told(error.errors(include_url=False), body)) from error


def _told(errors: Sequence[ErrorDetails], body: Any) -> str:
    """What is said of the error that lies deepest: of a union's branches, the one that fits best."""
    places = [_place(error, body) for error in errors]
    deepest = max(places, key=len)
    alike = [error for error, place in zip(errors, places, strict=True) if place == deepest]
    wanted = " or ".join(dict.fromkeys(map(_wanted, alike)))
    return f"{_path(deepest)} {_found(deepest, body)} (wanted: {wanted})"


def _place(error: ErrorDetails, body: Any) -> tuple[int | str, ...]:
    """Keys and indices of the body alone; pydantic has names of branches among them."""
    here, place = body, list[int | str]()
    for step in error["loc"]:
        is_key = step in here if isinstance(here, Mapping) else isinstance(here, list) and type(step) is int
        if is_key:
            here = here[step]
            place.append(step)
    if error["type"] == "missing":
        place.append(error["loc"][-1])
    if error["type"] in _TAGS and isinstance(here, Mapping):
        place.append(error["ctx"]["discriminator"].strip("'"))
    return tuple(place)


def _found(place: Sequence[int | str], body: Any) -> str:
    for step in place:
        if isinstance(body, Mapping) and step not in body:
            return "missing"
        body = body[step]
    return f"{body!r:.{_SHOWN}}"


def _path(place: Sequence[int | str]) -> str:
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in place]
    return "".join(steps).removeprefix(".") or "the body"


def _wanted(error: ErrorDetails) -> str:
    told = _WANTED.get(error["type"], error["msg"])
    return told.format(**error.get("ctx", {})).replace("'", "")
