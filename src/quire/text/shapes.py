"""Shapes of JSON: strict, with words of our own for what is wrong.

For fields that pydantic's own types would describe badly: a union's error names every member. Knows
nothing of what the shapes are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def wrong(message: str, *, param: str | None = None) -> PydanticCustomError:
    """`message` follows the field's name: "must be …". `param` where no field is being checked, but
    how several go together."""
    return PydanticCustomError("wrong", "{message}", {"message": message, "param": param})


def only(*accepted: Any) -> tuple[AfterValidator, WithJsonSchema]:
    """A field of OpenAI's that we do not have: null and these change nothing."""

    def check(value: object) -> object:
        if value is None or any(value == each and type(value) is type(each) for each in accepted):
            return value
        raise PydanticCustomError("unsupported", "is not supported by this server: leave it out")

    return AfterValidator(check), WithJsonSchema({"enum": [None, *accepted]})


def shaped(check: Callable[[Any], Any], *schemas: dict[str, Any]) -> Any:
    """A field whose forms are told apart by `check`, with its own words for what is wrong."""
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return (PlainValidator(check), WithJsonSchema(schema))


def optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def has_field(name: str, *kinds: str, **fields: Any) -> dict[str, Any]:
    """A schema of objects in which this field is given, as one of these kinds."""
    properties = {name: {"type": list(kinds)}} | fields
    return {"required": [name], "properties": properties}
