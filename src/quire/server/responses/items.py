"""Items of /v1/responses → messages of a chat.

What a model said in one turn comes as several items, and is one message again: reasoning, text and
calls that follow each other. So a turn that comes back is the tokens it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from quire.text.messages import Message
from quire.web.errors import ApiError, from_validation, invalid

_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(given: str | Sequence[dict[str, Any]]) -> list[Message]:
    """Raises ApiError."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    turns: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        fields = _fields(item, f"input.{i}")
        last = turns[-1] if turns else None
        is_same_turn = (
            last is not None
            and last["role"] == fields["role"] == "assistant"
            and not ("content" in last and "content" in fields)
            and not ("tool_calls" in last and "tool_calls" not in fields)
        )
        if last is not None and is_same_turn:
            calls = [*last.get("tool_calls", []), *fields.get("tool_calls", [])]
            last |= fields | ({"tool_calls": calls} if calls else {})
        else:
            turns.append(fields)
    return [_message(fields) for fields in turns]


def _message(fields: dict[str, Any]) -> Message:
    try:
        return Message.model_validate(fields)
    except ValidationError as error:
        found = from_validation(error)
        raise invalid("input", f"input: {found.message}") from None


def _fields(item: dict[str, Any], param: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    match kind:
        case "message":
            role = item.get("role")
            if role not in _ROLES:
                raise invalid(f"{param}.role", f"{param}.role must be one of {', '.join(_ROLES)}")
            return {"role": role, "content": _text(item.get("content"), f"{param}.content")}
        case "function_call":
            function = {
                "name": _string(item, "name", param),
                "arguments": _string(item, "arguments", param),
            }
            call = {"id": _string(item, "call_id", param), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            text = _text(item.get("output"), f"{param}.output")
            call_id = _string(item, "call_id", param)
            return {"role": "tool", "tool_call_id": call_id, "content": text}
        case "reasoning":
            shown = item.get("content") or item.get("summary") or []
            return {"role": "assistant", "reasoning_content": _text(shown, f"{param}.content")}
    raise invalid(
        f"{param}.type",
        f"{param} is of type {str(kind)[:40]!r}: this server takes message, function_call, "
        "function_call_output and reasoning",
    )


def _string(item: dict[str, Any], name: str, param: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        raise invalid(f"{param}.{name}", f"{param}.{name} must be a string")
    return found


def _text(value: Any, param: str) -> str:
    """A string, or parts of text, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _no_text(param)
    for part in value:
        if not isinstance(part, dict) or part.get("type") not in _TEXTS:
            raise _no_text(param)
        if not isinstance(part.get("text"), str):
            raise _no_text(param)
    return "".join(part["text"] for part in value)


def _no_text(param: str) -> ApiError:
    return invalid(param, f"{param} must be a string or parts of text: this model reads only text")
