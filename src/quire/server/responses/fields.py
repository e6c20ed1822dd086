"""What a request to /v1/responses may hold. As strict as requests.py of the package above."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.caching import CacheControl
from quire.server.forms import Salt, Timeout, schema_of
from quire.server.requests import PriorityField
from quire.text.messages import MAX_MESSAGES, MAX_TOOLS, FunctionName
from quire.text.shapes import Body, only, shaped, wrong

MAX_ID_CHARS = 128


class FunctionTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Any = None
    generate_summary: Any = None


def _check_format(value: Any) -> Any:
    """As it came: chat understands this form too."""
    if value is not None:
        schema_of(value)
    return value


TextFormat = Annotated[
    Any,
    *shaped(
        _check_format,
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "name": {"type": "string"},
                "schema": {"type": "object"},
            },
            "required": ["type", "schema"],
        },
        {"type": "null"},
    ),
]


class TextOptions(Body):
    format: TextFormat = None
    verbosity: Annotated[Any, *only("medium")] = None


def _check_choice(value: Any) -> Any:
    """As chat's, where a function's name stands deeper."""
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        name = value.get("name")
        if isinstance(name, str):
            return {"type": "function", "function": {"name": name}}
    raise wrong('must be "none", "auto", "required" or {"type": "function", "name": …}')


def _check_input(value: Any) -> str | list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        if len(value) > MAX_MESSAGES:
            raise wrong(f"has {len(value)} items: at most {MAX_MESSAGES} are possible")
        return value
    raise wrong("must be a text or a list of items, and not empty")


_NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_Choice = Annotated[
    Any,
    *shaped(_check_choice, {"enum": ["none", "auto", "required"]}, _NAMED, {"type": "null"}),
]
Input = Annotated[
    str | list[dict[str, Any]],
    *shaped(
        _check_input,
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
            "items": {
                "type": "object",
                "properties": {
                    "role": {"enum": ["user", "system", "developer", "assistant"]},
                    "content": {"type": "string"},
                },
                "required": ["role", "content"],
            },
        },
    ),
]


class ResponsesRequest(Body):
    model: str
    input: Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: _Choice = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: Any = None
    store: bool | None = None
    """False: no later request can go on from this one."""
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    cache_salt: Salt = None
    cache: CacheControl | None = None
    priority: PriorityField | None = None
    timeout: Timeout | None = None

    metadata: dict[str, Any] | None = None
    include: list[Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    top_logprobs: Annotated[Any, *only(0)] = None
    truncation: Annotated[Any, *only("disabled")] = None
    background: Annotated[Any, *only(False)] = None
    conversation: Annotated[Any, *only()] = None
    prompt: Annotated[Any, *only()] = None
