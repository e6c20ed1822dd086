"""A chat, run and told in the form of /v1/responses: whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from quire.server.answers import Start, count, usage_of
from quire.server.protocol import ChatRequest
from quire.server.responses.items import messages_of
from quire.server.responses.memory import ResponseMemory
from quire.server.responses.output import Output
from quire.server.responses.protocol import FunctionTool, ResponsesRequest
from quire.server.usage import Usage
from quire.text.messages import Message
from quire.web.errors import ApiError, from_validation


class Answering:
    """One request, from its items to its response."""

    def __init__(self, request: ResponsesRequest, memory: ResponseMemory, tenant: str = "") -> None:
        """Raises ApiError."""
        self._tenant = tenant
        self._request = request
        self._memory = memory
        self._id = f"resp_{secrets.token_hex(24)}"
        self._created = time.time()
        self._messages = [*self._before(), *messages_of(request.input)]
        self._output = Output()
        self.chat = self._chat()
        """The same, as a request to /v1/chat/completions."""

    async def whole(self, start: Start) -> bytes:
        """The JSON of a whole response. Raises ApiError."""
        async with start() as (work, _, pieces, _):
            usage = usage_of(work)
            async for piece in pieces:
                count(usage, piece, work)
                for said in piece.said:
                    self._output.say(said)
        self._end(piece.finish)
        return msgspec.json.encode(self._response(piece.finish, usage))

    async def events(self, start: Start) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises ApiError."""
        numbered = _Numbered()
        async with start() as (work, _, pieces, _):
            usage = usage_of(work)
            is_begun = False
            async for piece in pieces:
                count(usage, piece, work)
                if not is_begun:
                    is_begun = True
                    for name in ("created", "in_progress"):
                        yield numbered.event(_about(name, self._response(None, None)))
                for said in piece.said:
                    for event in self._output.say(said):
                        yield numbered.event(event)
        for event in self._end(piece.finish):
            yield numbered.event(event)
        response = self._response(piece.finish, usage)
        yield numbered.event(_about(response["status"], response))

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

    def _end(self, finish: str | None) -> list[dict[str, Any]]:
        events = self._output.close("incomplete" if finish == "length" else "completed")
        if self._request.store is not False:
            self._memory.keep(self._id, [*self._messages, self._output.message()], self._tenant)
        return events

    def _response(self, finish: str | None, usage: Usage | None) -> dict[str, Any]:
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
            "output": self._output.items,
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


class _Numbered:
    """Events of one stream, in order."""

    def __init__(self) -> None:
        self._number = 0

    def event(self, event: dict[str, Any]) -> bytes:
        numbered = event | {"sequence_number": self._number}
        self._number += 1
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
