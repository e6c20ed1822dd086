"""/v1/chat/completions: messages in, a message out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from quire.server.answers import Format, Running, Start
from quire.server.callers import Caller
from quire.server.generation import plan, run
from quire.server.protocol import ChatRequest
from quire.server.scoring import listed, score
from quire.server.service import Service
from quire.text.grammars import hold
from quire.text.scribe import Called, Said, Scored
from quire.text.tools import Reasoning, Text
from quire.text.vocabulary import Vocabulary


class ChatFormat(Format):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    shares_prompt = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def whole(self, index: int, said: list[Said], scored: list[Scored] | None) -> dict[str, Any]:
        text = "".join(each.text for each in said if isinstance(each, Text))
        thought = "".join(each.text for each in said if isinstance(each, Reasoning))
        calls = [_call(each) for each in said if isinstance(each, Called)]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
            message["content"] = text or None
        return {"message": message, "logprobs": self._logprobs(scored)}

    def opening(self, index: int) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, said: Said | None, scored: list[Scored] | None) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        match said:
            case Text(text):
                delta = {"content": text}
            case Reasoning(text):
                delta = {"reasoning_content": text}
            case Called():
                delta = {"tool_calls": [{"index": said.number} | _call(said)]}
        return {"delta": delta, "logprobs": self._logprobs(scored)}

    def _logprobs(self, scored: list[Scored] | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        return {
            "content": [
                self._entry(each.token, each.logprob)
                | {"top_logprobs": [self._entry(token, logprob) for token, logprob in each.top]}
                for each in scored
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._vocabulary.label(token),
            "logprob": logprob,
            "bytes": list(self._vocabulary.name(token)),
        }


def _call(called: Called) -> dict[str, Any]:
    function = {"name": called.name, "arguments": called.arguments}
    return {"id": called.id, "type": "function", "function": function}


def start_chat(service: Service, request: ChatRequest, caller: Caller) -> Start:
    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Running]:
        with service.admit(request.num_choices, request.model, caller.salt(request.cache_salt)):
            conversation = request.conversation(request.messages)
            prompt = await service.prompting.of_chat(conversation, service.info)
            is_one_call = request.parallel_tool_calls is False
            grammar = hold(
                service.prompting.reading,
                conversation,
                request.response_format,
                is_thinking=prompt.is_thinking,
                calls=request.wants_calls,
                is_one_call=is_one_call,
            )
            work = plan(
                service,
                request,
                [prompt],
                caller,
                tools=conversation.schemas if request.wants_calls else {},
                is_one_call=is_one_call,
                grammar=grammar,
            )
            vocabulary, count = service.prompting.vocabulary, request.num_prompt_logprobs
            scores = []
            if count is not None:
                scores = [listed(await score(service, work, prompt, count), vocabulary)]
            async with run(service, work) as pieces:
                yield Running(work, ChatFormat(vocabulary), pieces, scores)

    return start
