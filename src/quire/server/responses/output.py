"""OutputItems: the items of an answer as they grow, and the events that tell of it.

    item added ─▶ part added ─▶ deltas … ─▶ part done ─▶ item done      one item after the other

Calls are whole when they come: one delta each. Knows nothing of HTTP or of generation.
"""

from __future__ import annotations

import secrets
from typing import Any

from quire.text.messages import FunctionCall, Message, MessageCall
from quire.text.scribe import Called, Said
from quire.text.tools import Reasoning

_Event = dict[str, Any]


class OutputItems:
    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []

    def say(self, said: Said) -> list[_Event]:
        if isinstance(said, Called):
            return [*self.close(), *self._call(said)]
        events: list[_Event] = []
        kind = "reasoning" if isinstance(said, Reasoning) else "message"
        if self._open is None or self._open["type"] != kind:
            events = [*self.close(), *self._begin(kind)]
        self._texts.append(said.text)
        events.append(self._part_event("delta", delta=said.text))
        return events

    def close(self, status: str = "completed") -> list[_Event]:
        """The item that is open, if there is one, is whole."""
        item = self._open
        if item is None:
            return []
        text = "".join(self._texts)
        item["content"] = [_part(item, text)]
        item["status"] = status
        events = [self._part_event("done", text=text), self._event("content_part.done")]
        events[1] |= {"item_id": item["id"], "content_index": 0, "part": item["content"][0]}
        events.append(self._event("output_item.done", item=dict(item)))
        self._open, self._texts = None, []
        return events

    def message(self) -> Message:
        """All of it, as a turn of a chat."""
        texts = {"reasoning": "", "message": ""}
        calls = []
        for item in self.items:
            if item["type"] == "function_call":
                function = FunctionCall(name=item["name"], arguments=item["arguments"])
                calls.append(MessageCall(id=item["call_id"], type="function", function=function))
            else:
                texts[item["type"]] += "".join(part["text"] for part in item["content"])
        return Message(
            role="assistant",
            content=texts["message"],
            reasoning_content=texts["reasoning"] or None,
            tool_calls=calls or None,
        )

    def _begin(self, kind: str) -> list[_Event]:
        if kind == "reasoning":
            item: dict[str, Any] = {"id": _new_id("rs"), "type": kind, "summary": []}
        else:
            item = {"id": _new_id("msg"), "type": kind, "role": "assistant"}
        item |= {"status": "in_progress", "content": []}
        self._open = item
        self.items.append(item)
        part = _part(item, "")
        added = self._event("content_part.added", item_id=item["id"], content_index=0, part=part)
        return [self._event("output_item.added", item=dict(item)), added]

    def _call(self, called: Called) -> list[_Event]:
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": called.id,
            "name": called.name,
            "arguments": called.arguments,
        }
        self.items.append(item)
        begun = item | {"status": "in_progress", "arguments": ""}
        name, of = "function_call_arguments", {"item_id": item["id"]}
        arguments = called.arguments
        return [
            self._event("output_item.added", item=begun),
            self._event(f"{name}.delta", delta=arguments, **of),
            self._event(f"{name}.done", arguments=arguments, name=called.name, **of),
            self._event("output_item.done", item=dict(item)),
        ]

    def _part_event(self, what: str, **fields: Any) -> _Event:
        assert self._open is not None
        is_text = self._open["type"] == "message"
        if is_text:
            fields["logprobs"] = []
        name = "output_text" if is_text else "reasoning_text"
        return self._event(f"{name}.{what}", item_id=self._open["id"], content_index=0, **fields)

    def _event(self, kind: str, /, **fields: Any) -> _Event:
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1} | fields


def _part(item: dict[str, Any], text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
