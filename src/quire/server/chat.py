"""/v1/chat/completions: messages in, a message out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from quire.server.answers import Format, Running, Start
from quire.server.generation import Scored, plan, run
from quire.server.protocol import ChatRequest
from quire.server.service import Service
from quire.server.vocabulary import Vocabulary


class ChatFormat(Format):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def whole(self, index: int, text: str, scored: list[Scored] | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(scored)}

    def opening(self, index: int) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, text: str, scored: list[Scored] | None) -> dict[str, Any]:
        delta = {"content": text} if text or scored else {}
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


def start_chat(service: Service, request: ChatRequest, prefill: Sequence[str] = ()) -> Start:
    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Running]:
        with service.admit(request.num_choices, request.model):
            prompt = await service.prompting.of_messages(request.messages, service.info)
            work = plan(service, request, [prompt], prefill)
            async with run(service, work) as pieces:
                yield Running(work, ChatFormat(service.prompting.vocabulary), pieces)

    return start
