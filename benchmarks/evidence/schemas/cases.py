"""Random JSON schemas, and whether a value follows one, by a check that knows no grammar."""

import random
import re
import string
from collections.abc import Callable
from typing import Any

_PATTERNS = [r"^[a-z]{2,6}$", r"^\d{3}-\d{4}$", r"^(yes|no|maybe)$", r"^#[0-9a-f]{6}$"]
_WORDS = ["name", "age", "city", "tags", "größe", "a b", 'q"t', "id", "n", "x1", "wert", "値"]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """All that it allows is bounded in length, so that an answer comes to its end."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth > 0:
        kinds += ["object"] * 5 + ["array"] * 3 + ["anyOf", "ref"]
    kind = "object" if depth == 3 and rng.random() < 0.7 else rng.choice(kinds)
    return _MAKERS.get(kind, _plain)(rng, depth, kind)


def _plain(rng: random.Random, depth: int, kind: str) -> dict[str, Any]:
    if kind == "enum":
        letters = string.ascii_letters + 'äé☃"\\\n'
        words = ["".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(4)]
        return {"enum": [*words, rng.randint(0, 99), None]}
    if kind == "const":
        return {"const": rng.choice(["v1", 7, True, None, "ü\n"])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    return {"type": kind}


def _integer(rng: random.Random, depth: int, _: str) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    bounds = {"minimum": low, "maximum": low + rng.randint(0, 5000)}
    return {"type": "integer"} | (bounds if rng.random() < 0.7 else {})


def _number(rng: random.Random, depth: int, _: str) -> dict[str, Any]:
    bounds = {"minimum": -10, "maximum": rng.choice([10, 99.5])}
    return {"type": "number"} | (bounds if rng.random() < 0.5 else {})


def _string(rng: random.Random, depth: int, _: str) -> dict[str, Any]:
    least = rng.choice([0, 0, 1, 3])
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(1, 12)}


def _object(rng: random.Random, depth: int, _: str) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int, _: str) -> dict[str, Any]:
    least = rng.randint(0, 2)
    items = random_schema(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _any_of(rng: random.Random, depth: int, _: str) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _ref(rng: random.Random, depth: int, _: str) -> dict[str, Any]:
    inner = random_schema(rng, depth - 1)
    return {"anyOf": [inner, {"type": "array", "items": inner, "maxItems": 2}]}


_MAKERS = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
    "anyOf": _any_of,
    "ref": _ref,
}


def follows(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of the schema's, for the keywords above."""
    if "anyOf" in schema:
        return any(follows(value, each) for each in schema["anyOf"])
    if "const" in schema:
        return _same(value, schema["const"])
    if "enum" in schema:
        return any(_same(value, each) for each in schema["enum"])
    return _CHECKS[schema["type"]](value, schema)


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _is_string(value: Any, schema: dict[str, Any]) -> bool:
    if not isinstance(value, str):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    return bool(schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)))


def _is_number(value: Any, schema: dict[str, Any]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if schema["type"] == "integer" and value != int(value):
        return False
    return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))


def _is_object(value: Any, schema: dict[str, Any]) -> bool:
    return (
        isinstance(value, dict)
        and set(schema.get("required", ())) <= set(value) <= set(schema["properties"])
        and all(follows(each, schema["properties"][name]) for name, each in value.items())
    )


def _is_array(value: Any, schema: dict[str, Any]) -> bool:
    return (
        isinstance(value, list)
        and schema["maxItems"] >= len(value) >= schema.get("minItems", 0)
        and all(follows(each, schema["items"]) for each in value)
    )


_CHECKS: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "string": _is_string,
    "integer": _is_number,
    "number": _is_number,
    "object": _is_object,
    "array": _is_array,
    "boolean": lambda value, _: isinstance(value, bool),
    "null": lambda value, _: value is None,
}
