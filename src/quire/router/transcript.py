"""Transcript: what a client has got of a stream, so that another server can go on with it.

    server A   Once upon a ti✂          the client has: Once upon a ti
    server B   Once upon a time, …      skipped:        Once upon a ti       sent on: me, …

The request is sent again with the same seed, and with the tokens that A has told where they are
known: then B does not generate those again, it goes on after them. Either way it says first what A
said; that it does is checked letter by letter, and a stream that says something else is ended
rather than continued. Per choice: its texts, its calls, logprobs and token ids, whether it has
opened and finished. Knows OpenAI's chunks, no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.router.sieve import event_of

DONE = b"[DONE]"

_TEXTS = ("content", "reasoning_content", "text")
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Of a completion's logprobs: all of one length."""


class Diverged(Exception):
    """The replay is not what was said before."""


class Failed(Exception):
    """The server ended the stream with an error of its own."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error.get("message"))
        self.error = error


@dataclass(slots=True)
class _Text:
    """What grows: a choice's answer, or what it thinks before it."""

    delivered: list[str] = field(default_factory=list)

    # Of the replay under way:
    said: str = ""
    """The delivered text that it must repeat, up to `repeated` characters so far."""
    repeated: int = 0

    def replay(self) -> None:
        self.said = "".join(self.delivered)
        self.delivered = [self.said]
        self.repeated = 0

    def new_of(self, text: str) -> str:
        """Of a piece of text, what has not been delivered. Raises Diverged."""
        left = len(self.said) - self.repeated
        old, new = text[:left], text[left:]
        if not self.said.startswith(old, self.repeated):
            raise Diverged
        self.repeated += len(old)
        self.delivered.append(new)
        return new

    @property
    def is_behind(self) -> bool:
        return self.repeated < len(self.said)


@dataclass(slots=True)
class _Choice:
    texts: dict[str, _Text] = field(default_factory=dict)
    """By the name of their field."""
    calls: list[tuple[Any, Any]] = field(default_factory=list)
    """Name and arguments of each that was delivered; servers tell them whole."""
    num_scored: int = 0
    ids: list[int] = field(default_factory=list)
    """Of all tokens that were told."""
    is_open: bool = False
    is_finished: bool = False

    # Of the replay under way:
    num_repeated: int = 0
    """Of the calls."""
    skip_scored: int = 0
    skip_ids: int = 0

    def replay(self) -> None:
        for text in self.texts.values():
            text.replay()
        self.num_repeated = 0
        self.skip_scored = self.num_scored
        self.skip_ids = len(self.ids)

    def new_text(self, name: str, text: str) -> str:
        """Raises Diverged."""
        return self.texts.setdefault(name, _Text()).new_of(text)

    def new_calls(self, given: list[Any]) -> list[Any]:
        """Those that were not delivered. A call has another id with each server: the first one's
        is what the client knows. Raises Diverged."""
        new = []
        for call in given:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise msgspec.DecodeError("a call without a function")
            told = (function.get("name"), function.get("arguments"))
            if self.num_repeated == len(self.calls):
                self.calls.append(told)
                new.append(call)
            elif told != self.calls[self.num_repeated]:
                raise Diverged
            self.num_repeated += 1
        return new

    def new_ids(self, given: list[Any]) -> list[Any]:
        new = given[self.skip_ids :]
        self.skip_ids -= len(given) - len(new)
        self.ids += new
        return new

    @property
    def is_behind(self) -> bool:
        is_short = self.num_repeated < len(self.calls)
        return is_short or any(text.is_behind for text in self.texts.values())


class Transcript:
    def __init__(self, *, shows_ids: bool = True) -> None:
        """`shows_ids`: of tokens, to the client; else they are for us."""
        self._shows_ids = shows_ids
        self.is_begun = False
        """Whether the client has got anything."""
        self.is_done = False
        self._heading: dict[str, Any] = {}
        self._is_replay = False
        self._has_usage = False
        self._choices: dict[int, _Choice] = {}

    def replay(self) -> None:
        """From here on events come from the beginning again."""
        self._is_replay = self.is_begun
        for choice in self._choices.values():
            choice.replay()

    @property
    def said(self) -> list[int]:
        """Tokens of the answer so far, if there is only one; also of one that is finished, whose
        end another server can tell from them."""
        return self._choices[0].ids if self._choices.keys() == {0} else []

    def take(self, event: bytes) -> bytes | None:
        """One event's data, in; the event to send on, if there is anything new in it. Raises
        Diverged, Failed, and msgspec.DecodeError for what is no chunk."""
        if event == DONE:
            if any(choice.is_behind for choice in self._choices.values()):
                raise Diverged
            self.is_done = True
            return _event(DONE)
        chunk = msgspec.json.decode(event, type=dict[str, Any])
        if isinstance(chunk.get("error"), dict):
            raise Failed(chunk["error"])
        new = self._new(chunk)
        if new is None:
            return None
        if not self.is_begun:
            self.is_begun = True
            self._heading = {
                name: chunk[name]
                for name in ("id", "created", "system_fingerprint")
                if name in chunk
            }
        if self._is_replay or not self._shows_ids:
            return _event(msgspec.json.encode(new | self._heading))
        return _event(event_of(event, chunk))

    def _new(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        given = chunk.get("choices")
        if not given:
            if self._has_usage:
                return None
            self._has_usage = chunk.get("usage") is not None
            return chunk
        choices = [new for each in given if (new := self._new_choice(each)) is not None]
        return chunk | {"choices": choices} if choices else None

    def _new_choice(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """One choice of a chunk without what was delivered; None: it all was."""
        choice = self._choices.setdefault(given.get("index", 0), _Choice())
        found = given.get("delta")
        delta: dict[str, Any] | None = found if isinstance(found, dict) else None
        new = _news(choice, given if delta is None else delta)
        scored, num_scored = _without(given.get("logprobs"), choice.skip_scored)
        total = _num_scored(given.get("logprobs"))
        choice.skip_scored -= total - num_scored
        ids = choice.new_ids(given.get("token_ids") or [])
        finish = given.get("finish_reason")
        if finish is not None and choice.is_behind:
            raise Diverged
        opens = delta is not None and "role" in delta and not choice.is_open
        finishes = finish is not None and not choice.is_finished
        shown = ids if self._shows_ids else []
        is_news = bool(any(new.values()) or num_scored or shown or opens or finishes)
        choice.num_scored += num_scored
        choice.is_open |= opens
        choice.is_finished |= finishes
        if not is_news and (self._is_replay or not self._shows_ids):
            return None
        rest: dict[str, Any] = {"logprobs": scored}
        if self._shows_ids and "token_ids" in given:
            rest["token_ids"] = ids
        elif "token_ids" in given:
            given = {name: value for name, value in given.items() if name != "token_ids"}
        if delta is None:
            return given | new | rest
        kept = {k: v for k, v in delta.items() if k != "role" or opens} | new
        return given | {"delta": kept} | rest


def _news(choice: _Choice, said: dict[str, Any]) -> dict[str, Any]:
    """Of what is told bit by bit: its fields, without what was delivered. Raises Diverged."""
    new: dict[str, Any] = {
        name: choice.new_text(name, said[name] or "") for name in _TEXTS if name in said
    }
    if isinstance(said.get("tool_calls"), list):
        new["tool_calls"] = choice.new_calls(said["tool_calls"])
    return new


def _num_scored(logprobs: Any) -> int:
    if not isinstance(logprobs, dict):
        return 0
    return len(logprobs.get("content") or logprobs.get("tokens") or ())


def _without(logprobs: Any, skip: int) -> tuple[Any, int]:
    """Logprobs less the first `skip` entries; and how many are left."""
    total = _num_scored(logprobs)
    left = max(total - skip, 0)
    if not total or left == total:
        return logprobs, left
    names = ("content",) if logprobs.get("content") else _LISTS
    cut = {name: logprobs[name][skip:] for name in names if name in logprobs}
    return (logprobs | cut) if left else None, left


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
