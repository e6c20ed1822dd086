"""ChatTemplate: a conversation → the text of a prompt, by the model's own template.

Knows what templates differ in, and what to do for one that knows no tools: they are described in a
system message, calls and results are written into messages, all in Hermes's form (toolless.py).
Everything a client wrote goes through `Cleaning` first. Knows no token ids.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from typing import Any, Protocol

from quire.errors import InputError
from quire.text.messages import Conversation, Message, MessageCall, Tool
from quire.text.special import MAX_DEPTH, Cleaning, TooDeep
from quire.text.tools.toolless import described, told

_RESERVED = {"messages", "tools", "raise_exception", "strftime_now", "bos_token", "eos_token"}
_SHORT_ID = re.compile(r"length\s*(?:!=|==|<)\s*9\b")
_ID_CHARS = 9


class TemplateTokenizer(Protocol):
    """What we use of a tokenizer of transformers."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class ChatTemplate:
    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        self._tokenizer = tokenizer
        named = tokenizer.chat_template
        parts = named.values() if isinstance(named, dict) else [named or ""]
        self.source = "\n".join(map(str, parts))
        """Of all it has, if there are several."""
        self.knows_tools = re.search(r"\btools\b", self.source) is not None
        self._takes_text = "arguments is string" in self.source
        self._thought = "thinking" if "message.thinking" in self.source else "reasoning_content"
        self._has_short_ids = _SHORT_ID.search(self.source) is not None
        signature = inspect.signature(tokenizer.apply_chat_template)
        self._reserved = _RESERVED | set(signature.parameters)

    @property
    def exists(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def render(self, conversation: Conversation, cleaning: Cleaning) -> str:
        """Raises InputError."""
        try:
            options = self._options(conversation, cleaning)
            tools = [_described(tool, cleaning) for tool in conversation.tools]
        except TooDeep:
            raise InputError(
                None, f"tools or chat_template_kwargs are nested deeper than {MAX_DEPTH}"
            ) from None
        if tools and self.knows_tools:
            options["tools"] = tools
        messages = self._messages(conversation, cleaning)
        if tools and not self.knows_tools:
            messages = described(messages, tools)
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # a template is somebody else's program
            raise _refused(error) from error
        return str(rendered)

    def _options(self, conversation: Conversation, cleaning: Cleaning) -> dict[str, Any]:
        for name in conversation.options:
            if name in self._reserved:
                raise InputError(
                    "chat_template_kwargs",
                    f"chat_template_kwargs holds {name!r}, which is not the client's to set",
                )
        options: dict[str, Any] = {}
        if conversation.effort is not None:
            options["reasoning_effort"] = conversation.effort
            if conversation.effort == "none":
                options["enable_thinking"] = False
        given: dict[str, Any] = cleaning.deep(conversation.options)
        return options | given

    def _messages(self, conversation: Conversation, cleaning: Cleaning) -> list[dict[str, Any]]:
        called: dict[str, str] = {}  # names, by the calls' ids
        messages: list[dict[str, Any]] = []
        for message in conversation.messages:
            for call in message.tool_calls or ():
                called[call.id or ""] = call.function.name
            messages.append(self._message(message, cleaning, called))
        return messages if self.knows_tools else told(messages)

    def _message(
        self, message: Message, cleaning: Cleaning, called: dict[str, str]
    ) -> dict[str, Any]:
        # Templates know "system"; "developer" is OpenAI's newer word for it.
        role = "system" if message.role == "developer" else message.role
        is_result = role == "tool"
        clean = cleaning.strict if is_result else cleaning.text
        fields: dict[str, Any] = {"role": role, "content": clean(message.text)}
        name = message.name
        if is_result:
            name = name or called.get(message.tool_call_id or "")
            fields["tool_call_id"] = cleaning.strict(self._id(message.tool_call_id))
        if name is not None:
            fields["name"] = cleaning.strict(name) if is_result else cleaning.text(name)
        if message.role == "assistant" and message.thought is not None:
            fields[self._thought] = cleaning.text(message.thought)
        if message.tool_calls:
            fields["tool_calls"] = [self._call(call, cleaning) for call in message.tool_calls]
        return fields

    def _call(self, call: MessageCall, cleaning: Cleaning) -> dict[str, Any]:
        """Arguments are an object, as transformers has it; and the model's own text for templates
        that ask which of the two it is, so that the turn is the same tokens again."""
        text = call.function.arguments or "{}"
        arguments: Any = text
        if not self._takes_text and self.knows_tools:
            arguments = _object_or_text(text)
        try:
            clean = cleaning.deep(arguments)
        except TooDeep:
            clean = cleaning.strict(text)
        return {
            "id": cleaning.strict(self._id(call.id)),
            "type": "function",
            "function": {"name": cleaning.strict(call.function.name), "arguments": clean},
        }

    def _id(self, given: str | None) -> str:
        """Some templates take only ids of nine letters and digits: others get one of their own,
        the same every time."""
        given = given or ""
        if not self._has_short_ids or (len(given) == _ID_CHARS and given.isalnum()):
            return given
        return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:_ID_CHARS]


def _described(tool: Tool, cleaning: Cleaning) -> dict[str, Any]:
    """As transformers describes functions: always with a schema."""
    function = tool.function
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = cleaning.strict(function.description)
    schema = function.parameters or {"type": "object", "properties": {}}
    described["parameters"] = cleaning.deep(schema)
    return {"type": "function", "function": described}


def num_chars_of(conversation: Conversation) -> int:
    """Characters that a prompt of it has at least."""
    num_chars = 0
    for message in conversation.messages:
        num_chars += len(message.text)
        num_chars += sum(len(call.function.arguments or "") for call in message.tool_calls or ())
    return num_chars + sum(len(str(schema)) for schema in conversation.schemas.values())


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _refused(error: Exception) -> InputError:
    return InputError(
        "messages",
        f"the model's chat template does not take these messages: {str(error)[:300]}",
        code="chat_template_error",
    )
