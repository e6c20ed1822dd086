"""How a choice is written: what differs between the JSON of chats and that of completions.

Knows what was said and the names of tokens; nothing of requests, or of how answers are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from quire.text.scribe import Called, Said, Scored
from quire.text.tools import Reasoning, Text
from quire.text.vocabulary import Vocabulary


class First(NamedTuple):
    """The first token of a prompt: nothing is before it that makes it likely or not."""

    token: int
    offset: int = 0
    logprob: None = None


Echoed = Scored | First


class Echo(NamedTuple):
    """A prompt that is said again, before the choice."""

    text: str
    scored: Sequence[Echoed] = ()
    """Its tokens with their probabilities, if they are wanted."""


class Format(Protocol):
    """How one endpoint writes a choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    vocabulary: Vocabulary
    shares_prompt: bool
    """All choices have one prompt, whose token ids stand beside them and not in each."""

    def whole(
        self, said: list[Said], scored: list[Scored] | None, echo: Echo | None
    ) -> dict[str, Any]:
        """A whole choice, less index and finish_reason."""

    def opening(self, echo: Echo | None) -> dict[str, Any] | None:
        """What a stream says before a choice's first token."""

    def chunk(self, said: Said | None, scored: list[Scored] | None) -> dict[str, Any]:
        """A piece of a choice; None: nothing that is certain yet."""


class ChatFormat(Format):
    """A message."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    shares_prompt = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def whole(
        self, said: list[Said], scored: list[Scored] | None, echo: Echo | None
    ) -> dict[str, Any]:
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

    def opening(self, echo: Echo | None) -> dict[str, Any]:
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
            "token": self.vocabulary.label(token),
            "logprob": logprob,
            "bytes": list(self.vocabulary.name(token)),
        }


def _call(called: Called) -> dict[str, Any]:
    function = {"name": called.name, "arguments": called.arguments}
    return {"id": called.id, "type": "function", "function": function}


class CompletionFormat(Format):
    """A text, which may begin with its prompt."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    shares_prompt = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def whole(
        self, said: list[Said], scored: list[Scored] | None, echo: Echo | None
    ) -> dict[str, Any]:
        text = "".join(each.text for each in said if isinstance(each, Text))
        if echo is None:
            return self.chunk(Text(text), scored)
        if not echo.scored or scored is None:
            return self.chunk(Text(echo.text + text), scored)
        moved = [each._replace(offset=each.offset + len(echo.text)) for each in scored]
        return {"text": echo.text + text, "logprobs": self._logprobs([*echo.scored, *moved])}

    def opening(self, echo: Echo | None) -> dict[str, Any] | None:
        return None if echo is None else {"text": echo.text, "logprobs": None}

    def chunk(self, said: Said | None, scored: list[Scored] | None) -> dict[str, Any]:
        text = said.text if isinstance(said, Text) else ""
        return {"text": text, "logprobs": self._logprobs(scored)}

    def _logprobs(self, scored: Sequence[Echoed] | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        label = self.vocabulary.label
        return {
            "tokens": [label(each.token) for each in scored],
            "token_logprobs": [each.logprob for each in scored],
            "top_logprobs": [
                # The sampled token is always there, so there may be one more than asked for.
                None
                if each.logprob is None
                else {label(token): logprob for token, logprob in each.top}
                | {label(each.token): each.logprob}
                for each in scored
            ],
            "text_offset": [each.offset for each in scored],
        }


def prompt_logprobs(
    scored: Sequence[Scored], vocabulary: Vocabulary
) -> list[dict[str, Any] | None]:
    """As vLLM has them: one entry per token of the prompt, by token id."""
    return [None, *(_entry(each, vocabulary) for each in scored)]


def _entry(scored: Scored, vocabulary: Vocabulary) -> dict[str, Any]:
    def told(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": vocabulary.label(token)}

    ranks = {token: rank for rank, (token, _) in enumerate(scored.top, 1)}
    found = {str(token): told(token, logprob, ranks[token]) for token, logprob in scored.top}
    own = told(scored.token, scored.logprob, ranks.get(scored.token))
    return found | {str(scored.token): own}
