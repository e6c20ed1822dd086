"""The forms a field of a request may take: each with its check, its words for what is wrong, and
its schema.

For fields that pydantic's own types would describe badly: a union's error names every member, and
a prompt of a million token ids is checked here in one pass. Knows nothing of requests.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from quire.text.shapes import optional, shaped, wrong

MAX_PROMPTS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIASES = 1024
MAX_SALT_CHARS = 128

_INT64 = 1 << 63
_SALT = re.compile(rf"[!-~]{{1,{MAX_SALT_CHARS}}}")


_TEXT = {"type": "string"}
TOKEN_ID, TIMEOUT = "token-id", "timeout"
"""In a schema's `format`: its bounds are this server's."""
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "format": TOKEN_ID}, "minItems": 1}
TokenId = Annotated[int, Field(json_schema_extra={"format": TOKEN_ID})]
Timeout = Annotated[float, Field(gt=0, json_schema_extra={"format": TIMEOUT})]


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return value
        if len(value) > MAX_PROMPTS:
            raise wrong(f"has {len(value)} prompts: at most {MAX_PROMPTS} go into one request")
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item for item in value) and all(
            type(token) is int for item in value for token in item
        ):
            return value
    raise wrong(
        "must be a string, a list of strings, a list of token ids or a list of such lists, "
        "and not empty"
    )


def _check_one_prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    raise wrong("must be a string or a list of token ids, and not empty")


def schema_of(value: Any) -> dict[str, Any] | None:
    """The schema that an answer must follow; None: it is text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        named = value.get("json_schema", value)  # /v1/responses writes it without the inner object
        schema = named.get("schema") if isinstance(named, dict) else None
        if isinstance(schema, dict) and isinstance(named.get("name", ""), str):
            return schema
        raise wrong("needs a schema, which is an object; its name is a string")
    raise wrong('must be of type "text", "json_object" or "json_schema"')


def _check_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if value is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise wrong(f"has {len(stops)} strings: at most {MAX_STOPS} are possible")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise wrong(f"strings must have 1 to {MAX_STOP_CHARS} characters")
    return list(stops)


def _check_salt(value: Any) -> str:
    if isinstance(value, str) and _SALT.fullmatch(value):
        return value
    raise wrong(f"must be 1 to {MAX_SALT_CHARS} printable ASCII characters without spaces")


def _check_logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong('must be an object {"token id": bias}')
    if len(value) > MAX_LOGIT_BIASES:
        raise wrong(f"has {len(value)} entries: at most {MAX_LOGIT_BIASES} are possible")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise wrong(f"has the key {token[:40]!r}: keys are token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise wrong(f"of token {token} must be a number from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


_NULL = {"type": "null"}
_SALT_SCHEMA = {"type": "string", "pattern": f"^[!-~]{{1,{MAX_SALT_CHARS}}}$"}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}

PromptField = Annotated[
    str | list[str] | list[int] | list[list[int]],
    *shaped(
        _check_prompt,
        _TEXT | {"minLength": 1},
        {"type": "array", "items": _TEXT | {"minLength": 1}, "minItems": 1},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ),
]
OnePrompt = Annotated[
    str | list[int] | None,
    *shaped(optional(_check_one_prompt), _TEXT | {"minLength": 1}, _TOKEN_IDS, _NULL),
]
_SCHEMA = {"type": "object"}
ResponseFormat = Annotated[
    dict[str, Any] | None,
    *shaped(
        optional(schema_of),
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {"name": _TEXT, "schema": _SCHEMA},
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        _NULL,
    ),
]
StopField = Annotated[
    list[str],
    *shaped(
        _check_stop,
        _STOP_TEXT,
        {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS},
        _NULL,
    ),
]
Salt = Annotated[str | None, *shaped(optional(_check_salt), _SALT_SCHEMA, _NULL)]
LogitBias = Annotated[
    dict[int, float],
    *shaped(
        _check_logit_bias,
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIASES,
        },
        _NULL,
    ),
]
SeedField = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
