"""Request bodies made from the server's own description of itself, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "\u0000", "<|im_end|>", "9" * 50, "%s", "../..", "\U0001f600"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def posted(openapi: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The schema of the body of each path that takes one, whole in itself."""
    schemas = openapi["components"]["schemas"]
    return {
        path: _inlined(operation["requestBody"]["content"]["application/json"]["schema"], schemas)
        for path, operations in openapi["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }


def _inlined(schema: Any, schemas: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(each, schemas) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    return {name: _inlined(each, schemas) for name, each in schema.items()}


def bodies(schema: dict[str, Any], fixed: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Good ones by the schema, the same with one field spoilt, and what is not JSON at all.

    `fixed`: fields that are set so that something happens, and not too much of it.
    """
    good = made(schema).map(lambda body: body | fixed)
    names = st.sampled_from([*schema["properties"], "unheard_of"])
    spoilt = st.builds(lambda body, name, junk: body | {name: junk}, good, names, JUNK)
    as_json = st.one_of(good, spoilt, JUNK).map(lambda body: json.dumps(body).encode())
    return st.one_of(as_json, as_json, st.binary(max_size=50))


def made(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema, as far as the server's own go. Lists are kept short.

    (hypothesis-jsonschema does the same for any schema, but not with the hypothesis of today.)
    """
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        narrowed = "properties" in schema
        return st.one_of(
            [made(_narrowed(schema, each) if narrowed else each) for each in schema["anyOf"]]
        )
    kinds: dict[str | None, Callable[[dict[str, Any]], st.SearchStrategy[Any]]] = {
        "object": _object,
        "array": _array,
        "string": _string,
        "integer": lambda schema: st.integers(*_bounds(schema, 1)),
        "number": lambda schema: st.floats(*_bounds(schema, 0.001)),
        "boolean": lambda _: st.booleans(),
        "null": lambda _: st.none(),
        None: lambda _: JUNK,
    }
    return kinds[schema.get("type")](schema)


def _narrowed(schema: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """An object's schema for one of its cases, which says more of some fields."""
    fields = dict(schema["properties"])
    for name, said in case["properties"].items():
        kinds = said.get("type", [])
        forms = [each for each in fields[name].get("anyOf", []) if each.get("type") in kinds]
        fields[name] = {"anyOf": forms} if forms else said
    required = {*schema.get("required", ()), *case.get("required", ())}
    rest = {name: each for name, each in schema.items() if name != "anyOf"}
    return rest | {"properties": fields, "required": sorted(required)}


def _array(schema: dict[str, Any]) -> st.SearchStrategy[list[Any]]:
    most = min(schema.get("maxItems", 3), 3)
    return st.lists(made(schema["items"]), min_size=schema.get("minItems", 0), max_size=most)


def _string(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    most = min(schema.get("maxLength", 20), 20)
    return st.text(min_size=schema.get("minLength", 0), max_size=most)


def _object(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    if "propertyNames" in schema:
        names = st.from_regex(schema["propertyNames"]["pattern"], fullmatch=True)
        inner = schema["additionalProperties"]
        return st.dictionaries(names, JUNK if inner is True else made(inner), max_size=3)
    if "properties" not in schema:
        return st.dictionaries(st.text(max_size=8), JUNK, max_size=3)
    required = set(schema.get("required", []))
    fields = {name: made(each) for name, each in schema["properties"].items()}
    return st.fixed_dictionaries(
        {name: each for name, each in fields.items() if name in required},
        optional={
            # Fields that are not supported take any value in the schema, and none in truth.
            name: each
            for name, each in fields.items()
            if name not in required and schema["properties"][name].keys() - {"title", "default"}
        },
    )


def _bounds(schema: dict[str, Any], step: float) -> tuple[Any, Any]:
    low, high = schema.get("minimum", -1000), schema.get("maximum", 1000)
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    return low, high
