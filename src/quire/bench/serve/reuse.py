"""Of what turns could have reused, how much was, and what broke the rest.

    turn before   [ prompt ······················ ][ answer ]
    this turn     [ shared, token by token ··· ✂ ··········· ]
                  ╰── possible: found at best ─╯
                  ╰── reached: was cached ─╯

Possible is the longest beginning that any request answered before has computed, prompt or answer.
Where a turn does not even share all of its session's last prompt, something has changed it; what
it was is told by the first message, or function, that is different. Knows tokens and messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.bench import Json
from quire.bench.serve.chatting import ChatAnswer

_Tokens = npt.NDArray[np.int64]

REORDERED = "the tools came in another order"
OTHER_TOOLS = "the tools changed"
SYSTEM = "the system prompt changed"
HISTORY = "the client changed what was said before"
TEMPLATE = "the template wrote the history anew"


@dataclass(frozen=True, slots=True)
class _Asked:
    messages: Sequence[Json]
    tools: Sequence[Json]
    prompt: _Tokens


class Reuse:
    def __init__(self) -> None:
        self._computed: list[_Tokens] = []
        self._last: dict[str, _Asked] = {}
        self._broken: defaultdict[str, list[int]] = defaultdict(list)
        """By reason, the tokens that each turn lost."""
        self.possible_tokens = self.reached_tokens = self.num_turns = 0

    @property
    def num_computed(self) -> int:
        return len(self._computed)

    def add(
        self,
        session: str,
        messages: Sequence[Json],
        tools: Sequence[Json],
        answer: ChatAnswer,
        num_before: int,
    ) -> None:
        """A turn that was answered; so many were computed when it was asked."""
        asked = _Asked(list(messages), list(tools), np.asarray(answer.prompt_ids, np.int64))
        before = self._last.get(session)
        if before is not None:
            lost = len(before.prompt) - _shared(asked.prompt, before.prompt)
            # A prompt's end may be written otherwise once something follows it.
            if lost > _END_TOKENS:
                self._broken[_reason(before, asked)].append(lost)
        self._last[session] = asked
        possible = self._possible(asked.prompt, num_before)
        self.num_turns += 1
        self.possible_tokens += possible
        self.reached_tokens += min(sum((answer.cached or {}).values()), possible)
        self._computed.append(np.asarray([*answer.prompt_ids, *answer.output_ids], np.int64))

    def _possible(self, prompt: _Tokens, num_before: int) -> int:
        """One token at least is left to compute."""
        found = (_shared(prompt, other) for other in self._computed[:num_before])
        return min(max(found, default=0), max(0, len(prompt) - 1))

    def result(self) -> Json:
        return {
            "turns": self.num_turns,
            "possible_tokens": self.possible_tokens,
            "reached_tokens": self.reached_tokens,
            "share": self.reached_tokens / self.possible_tokens if self.possible_tokens else None,
            "broken": [
                {"reason": reason, "turns": len(lost), "tokens": sum(lost)}
                for reason, lost in sorted(self._broken.items(), key=lambda each: -sum(each[1]))
            ],
        }


_END_TOKENS = 16


def _shared(a: _Tokens, b: _Tokens) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _reason(before: _Asked, now: _Asked) -> str:
    if before.tools != now.tools:
        same = sorted(map(repr, before.tools)) == sorted(map(repr, now.tools))
        return REORDERED if same else OTHER_TOOLS
    for one, other in zip(before.messages, now.messages, strict=False):
        if one != other:
            is_system = one.get("role") in ("system", "developer")
            return SYSTEM if is_system else HISTORY
    return HISTORY if len(now.messages) < len(before.messages) else TEMPLATE
