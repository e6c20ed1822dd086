"""JSON that a model wrote → calls. Arguments keep the model's own bytes where these are right, so
that the same call in the next turn's history is the same tokens again.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import msgspec

from quire.text.tools.base import Call, NotACall, Reason

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")


def calls_of(text: str, known: Collection[str] | None = None) -> list[Call]:
    """An object or a list of them. `known`: names of functions; others are no calls then.
    Raises NotACall."""
    raw = _members(text)
    calls = [_call(each) for each in raw]
    if known is not None and not all(call.name in known for call in calls):
        raise NotACall(Reason.UNKNOWN_FUNCTION)
    return calls


def arguments_of(text: str) -> str:
    """`text`, which is to be a JSON object; an empty one if it is blank. Raises NotACall."""
    text = text.strip()
    if not text or text == "null":
        return "{}"
    value, text = _decoded(text)
    if isinstance(value, str):  # JSON in a string in JSON
        value, text = _decoded(value)
    if not isinstance(value, dict):
        raise NotACall(Reason.NO_ARGUMENTS)
    return text


def dumped(value: Any) -> str:
    """As JSON. Raises NotACall for what JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise NotACall(Reason.SYNTAX) from None


def _members(text: str) -> list[dict[str, str]]:
    """The calls' members, each as JSON."""
    text = text.strip()
    try:
        if text.startswith("["):
            found = msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]])
        else:
            found = [msgspec.json.decode(text, type=dict[str, msgspec.Raw])]
        return [{name: bytes(raw).decode() for name, raw in each.items()} for each in found]
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        pass
    value, _ = _decoded(text)
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(each, dict) for each in listed):
        raise NotACall(Reason.NOT_JSON)
    return [{name: dumped(member) for name, member in each.items()} for each in listed]


def _call(members: dict[str, str]) -> Call:
    inner = members.get("function", "")
    if inner.startswith("{"):  # OpenAI's own form
        (members,) = _members(inner)
    name = next((members[key] for key in _NAMES if key in members), "")
    arguments = next((members[key] for key in _ARGUMENTS if key in members), "")
    decoded = _decoded(name)[0] if name else ""
    if not isinstance(decoded, str) or not decoded:
        raise NotACall(Reason.NO_NAME)
    return Call(decoded, arguments_of(arguments))


def _decoded(text: str) -> tuple[Any, str]:
    """A value and its JSON: `text` itself if it is right. Models put raw line ends into strings:
    such text is taken, and written again. Raises NotACall."""
    try:
        return msgspec.json.decode(text), text
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        pass
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
        again = dumped(value)
        again.encode()
    except (ValueError, RecursionError):
        raise NotACall(Reason.NOT_JSON) from None
    return value, again


def _refuse(constant: str) -> None:
    raise ValueError(constant)
