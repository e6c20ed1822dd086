"""A request to /v1/responses as a chat, and the chat's answer as a response, whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from quire.server.answers import Answering, Streamed, Usage, Whole
from quire.server.generation import Running
from quire.server.requests import ChatRequest
from quire.server.responses.fields import FunctionTool, ResponsesRequest
from quire.server.responses.items import messages_of
from quire.server.responses.output import OutputItems
from quire.server.responses.remembered import ResponseMemory
from quire.text.messages import Message
from quire.text.scribe import Piece
from quire.web.errors import ApiError, from_validation


class ResponseAnswer(Answering):
    """One request, as a chat; and the chat's answer, as a response."""

    def __init__(self, request: ResponsesRequest, memory: ResponseMemory, tenant: str = "") -> None:
        """Raises ApiError."""
        self._tenant = tenant
        self._request = request
        self._memory = memory
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created = time.time()
        self._messages = [*self._before(), *messages_of(request.input)]
        self.chat = self._chat()
        """The same, as a request to /v1/chat/completions."""

    def whole(self, running: Running) -> Whole:
        return _Response(self, running)

    def streamed(self, running: Running) -> Streamed:
        return _Response(self, running)

    def keep(self, said: Message) -> None:
        """For requests that go on from this one."""
        if self._request.store is not False:
            self._memory.keep(self._id, [*self._messages, said], self._tenant)

    def _before(self) -> Sequence[Message]:
        name = self._request.previous_response_id
        if name is None:
            return ()
        found = self._memory.find(name, self._tenant)
        if found is None:
            raise ApiError(
                404,
                "there is no response of that previous_response_id here (any more): send the items",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found

    def _chat(self) -> ChatRequest:
        request = self._request
        instructions = request.instructions
        said = [] if instructions is None else [Message(role="system", content=instructions)]
        try:
            return ChatRequest.model_validate(
                {
                    "model": request.model,
                    "messages": [*said, *self._messages],
                    "tools": [_tool(tool) for tool in request.tools or ()],
                    "tool_choice": request.tool_choice,
                    "parallel_tool_calls": request.parallel_tool_calls,
                    "max_completion_tokens": request.max_output_tokens,
                    "temperature": request.temperature,
                    "top_p": request.top_p,
                    "stream": request.stream,
                    "reasoning_effort": request.reasoning and request.reasoning.effort,
                    "response_format": request.text and request.text.format,
                    "cache_salt": request.cache_salt,
                    "cache": request.cache,
                    "prompt_cache_retention": request.prompt_cache_retention,
                    "priority": request.priority,
                    "timeout": request.timeout,
                }
            )
        except ValidationError as error:
            raise from_validation(error) from None

    def told(
        self, items: list[dict[str, Any]], finish: str | None, usage: Usage | None
    ) -> dict[str, Any]:
        """The response, as it is now. `finish`: why it ended; None: it has not."""
        request = self._request
        is_cut = finish == "length"
        status = "in_progress" if finish is None else "incomplete" if is_cut else "completed"
        choice = request.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "name": choice["function"]["name"]}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": self.chat.reasoning_effort, "summary": None},
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": request.user,
        }


class _Response(Whole, Streamed):
    """A response as it grows."""

    def __init__(self, answer: ResponseAnswer, running: Running) -> None:
        self._answer = answer
        self._running = running
        self._usage = Usage.of(running)
        self._output = OutputItems()
        self._finish: str | None = None
        self._num_events = 0

    def add(self, piece: Piece) -> None:
        for _ in self._take(piece):
            pass

    def encoded(self) -> bytes:
        self._end()
        return msgspec.json.encode(self._now(self._usage))

    def tell(self, piece: Piece) -> Iterator[bytes]:
        if not self._num_events:
            for name in ("created", "in_progress"):
                yield self._event(_about(name, self._now(None)))
        for event in self._take(piece):
            yield self._event(event)

    def end(self) -> Iterator[bytes]:
        for event in self._end():
            yield self._event(event)
        response = self._now(self._usage)
        yield self._event(_about(response["status"], response))

    def _take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        self._usage.count(piece, self._running)
        for said in piece.said:
            yield from self._output.say(said)
        self._finish = piece.finish

    def _end(self) -> list[dict[str, Any]]:
        is_cut = self._finish == "length"
        events = self._output.close("incomplete" if is_cut else "completed")
        self._answer.keep(self._output.message())
        return events

    def _now(self, usage: Usage | None) -> dict[str, Any]:
        return self._answer.told(self._output.items, self._finish, usage)

    def _event(self, event: dict[str, Any]) -> bytes:
        """They are numbered, in order."""
        numbered = event | {"sequence_number": self._num_events}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(numbered))


def _about(name: str, response: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"response.{name}", "response": response}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: getattr(tool, name) for name in names}}


def _usage(usage: Usage) -> dict[str, Any]:
    """In the words of this endpoint."""
    found = usage.to_dict()
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": found["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": found["total_tokens"],
    }
