"""Conversations that a later request may go on from, by the id of their last response.

In memory, the longest unused go first, bounded by number and by size. Not shared between servers,
and gone with the process: a client that must not lose one sends its items itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from quire.text.messages import Message

MAX_RESPONSES = 1024
MAX_CHARS = 64 << 20
"""Of all together. A text in several conversations counts in each."""


class _Kept(NamedTuple):
    messages: tuple[Message, ...]
    tenant: str
    num_chars: int


class ResponseMemory:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_chars = 0

    def keep(self, name: str, messages: Sequence[Message], tenant: str = "") -> None:
        kept = _Kept(tuple(messages), tenant, sum(map(_num_chars, messages)))
        self._kept[name] = kept
        self._num_chars += kept.num_chars
        while len(self._kept) > self._max_responses or self._num_chars > self._max_chars:
            _, gone = self._kept.popitem(last=False)
            self._num_chars -= gone.num_chars

    def find(self, name: str, tenant: str = "") -> Sequence[Message] | None:
        """None: there is none, or it is another tenant's."""
        kept = self._kept.get(name)
        if kept is None or kept.tenant != tenant:
            return None
        self._kept.move_to_end(name)
        return kept.messages


def _num_chars(message: Message) -> int:
    calls = message.tool_calls or ()
    return (
        len(message.text)
        + len(message.thought or "")
        + sum(len(call.function.arguments or "") for call in calls)
    )
