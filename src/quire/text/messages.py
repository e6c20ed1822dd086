"""What a conversation may hold: messages, calls in them, and the functions that may be called.

Part of what requests hold, and as strict. Knows no model: what a template makes of them is in
templates.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from quire.text.shapes import Body, has_field, only, optional, shaped, wrong

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_CALLS = 512
"""In one message."""
MAX_TEMPLATE_FIELDS = 32

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


def _check_content(value: Any) -> str:
    """A string, or text parts, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong('must be a string or a list of {"type": "text", "text": …}')
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise wrong(f"holds a part of type {str(kind)[:40]!r}: this model reads only text")
        if not isinstance(part.get("text"), str):  # what else it has is about caching, elsewhere
            raise wrong('parts must be {"type": "text", "text": a string}')
    return "".join(part["text"] for part in value)


def _check_tool_choice(value: Any) -> str:
    """A function's name gets a colon before it, which tells it from the words."""
    if value in ("none", "auto", "required") and isinstance(value, str):
        return value
    function = value.get("function") if isinstance(value, dict) else None
    if isinstance(function, dict) and value.get("type") == "function":
        name = function.get("name")
        if isinstance(name, str):
            return f":{name}"
    raise wrong(
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    )


def _check_template_fields(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(name.isidentifier() for name in value):
        raise wrong("must be an object whose keys are names")
    if len(value) > MAX_TEMPLATE_FIELDS:
        raise wrong(f"has {len(value)} fields: at most {MAX_TEMPLATE_FIELDS} are possible")
    return value


_TEXT = {"type": "string"}
_NULL = {"type": "null"}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}

OptionalContent = Annotated[
    str | None, *shaped(optional(_check_content), _TEXT, {"type": "array", "items": _PART}, _NULL)
]
ToolChoice = Annotated[
    str | None,
    *shaped(
        optional(_check_tool_choice),
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": _TEXT},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
        _NULL,
    ),
]
TemplateFields = Annotated[
    dict[str, Any],
    *shaped(
        _check_template_fields,
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z_]{1,20}$"},
            "additionalProperties": True,
            "maxProperties": MAX_TEMPLATE_FIELDS,
        },
        _NULL,
    ),
]


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | None = None
    """JSON, as the model wrote it."""


class MessageCall(Body):
    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: int | None = None
    """Of a streamed call, which some clients send back as it came."""


_ASSISTANT = {"role": {"const": "assistant"}}


class Message(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                has_field("content", "string", "array", tool_calls={"type": "null"}),
                has_field("content", "string", "array", **_ASSISTANT),
                has_field("refusal", "string", **_ASSISTANT),
                has_field("reasoning_content", "string", **_ASSISTANT),
                has_field("reasoning", "string", **_ASSISTANT),
                has_field("tool_calls", "array", **_ASSISTANT),
            ]
        }
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: OptionalContent = None
    """May be missing where an assistant only called functions."""
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of reasoning_content."""
    refusal: str | None = None
    annotations: Any = None
    audio: Annotated[Any, *only()] = None
    function_call: Annotated[Any, *only()] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.role != "assistant" and self.tool_calls:
            raise wrong("is for assistants", param="tool_calls")
        if self.content is None and not (self.role == "assistant" and self._says_otherwise):
            raise wrong("is missing: it must be a string or text parts", param="content")
        return self

    @property
    def _says_otherwise(self) -> bool:
        return bool(self.tool_calls) or self.thought is not None or self.refusal is not None

    @property
    def text(self) -> str:
        return self.content or self.refusal or ""

    @property
    def thought(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Are the arguments held to the schema? Else they are an object, and no more is known."""


class Tool(Body):
    type: Literal["function"]
    function: Function


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that a template is given, and what the answer must begin with."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    must_call: bool = False
    function: str | None = None
    """The one that must be called; None: any, if one must."""
    options: dict[str, Any] = field(default_factory=dict)
    effort: str | None = None

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}


class TemplateRequest(Body):
    """What the prompt of a chat depends on, beside its messages."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    chat_template_kwargs: TemplateFields = Field(default_factory=dict)
    """For the model's template, by the names it gives them."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        choice = self.tool_choice
        is_named = choice not in (None, "none", "auto", "required")
        return Conversation(
            messages,
            self.tools or (),
            must_call=is_named or choice == "required",
            function=choice.removeprefix(":") if is_named and choice else None,
            options=self.chat_template_kwargs,
            effort=self.reasoning_effort,
        )

    @property
    def wants_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @model_validator(mode="after")
    def _choice_is_there(self) -> Self:
        wanted = self.conversation(())
        if wanted.must_call and not self.tools:
            raise wrong("needs tools to choose from", param="tool_choice")
        if wanted.function is not None and wanted.function not in wanted.schemas:
            raise wrong(
                f"names {wanted.function[:80]!r}, which is not in tools", param="tool_choice"
            )
        return self
