"""Plan: which conversations `quire bench pd` holds, on which sides, and in how much time.

A *wave* is a number of conversations that grow together, turn by turn, from `shortest` to
`longest` tokens; there are as many waves as it takes to have enough later turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evidence.disagg.sessions import Plan as Sessions
from quire.errors import ConfigError
from quire.peer.kinds import TransportKind

_GROWTH = 0.8
"""Of the way from shortest to longest that a conversation grows; they begin at different points of
the rest."""
_MAX_LATER = 36
"""Turns of one conversation after its first."""

UNIFIED = "unified"


@dataclass(frozen=True, slots=True)
class Side:
    """One of those that are compared: a decode engine, or one that does everything."""

    name: str
    transport: TransportKind | None = None
    """None: it has no peer."""
    has_cache: bool = True


def side_name(transport: TransportKind, *, has_cache: bool) -> str:
    return f"{transport.value} {'on' if has_cache else 'off'}"


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path
    """A directory as transformers saves it."""
    device: str = "cuda"
    added: tuple[int, ...] = (500, 2000)
    """New tokens of each later turn, beside the answer before: one comparison each."""
    transports: tuple[TransportKind, ...] = (TransportKind.TCP, TransportKind.SHM)
    later_turns: int = 200
    """Of each side and `added`, at least."""
    sessions: int = 6
    """That grow together."""
    shortest: int = 8_000
    longest: int = 32_000
    answer: int = 32
    at_once: int = 4
    """Requests."""
    bytes_repeats: int = 4
    """Hand-overs of one long prompt that is computed, for what the way itself does; 0: none."""
    limit_s: float | None = None
    """Seconds of asking after which no other round begins; what there is then is shown."""
    decode_computes: int = 1024
    """As the option of that name."""
    chunk_tokens: int = 2048
    page_size: int = 64
    threads: int = 0
    vocabulary: int = 150_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.longest < self.shortest + max(self.added) + self.answer:
            raise ConfigError(
                f"--longest {self.longest} leaves no room for a later turn of {max(self.added)} "
                f"tokens after {self.shortest}: raise it, or lower --shortest or --added"
            )

    def sides(self) -> list[Side]:
        pairs = [
            Side(side_name(transport, has_cache=on), transport, on)
            for transport in self.transports
            for on in (True, False)
        ]
        return [*pairs, Side(UNIFIED)]

    def turns(self, added: int) -> int:
        """Of one conversation, with its first."""
        room = int((self.longest - self.shortest) * _GROWTH) // (added + self.answer)
        return 1 + min(max(1, room), _MAX_LATER, -(-self.later_turns // self.sessions))

    def waves(self, added: int) -> Iterator[Sessions]:
        turns = self.turns(added)
        grown = (turns - 1) * (added + self.answer)
        for number in range(-(-self.later_turns // (self.sessions * (turns - 1)))):
            yield Sessions(
                sessions=self.sessions,
                shortest=self.shortest,
                longest=max(self.shortest, self.longest - grown),
                turns=turns,
                added=added,
                answer=self.answer,
                at_once=self.at_once,
                vocabulary=self.vocabulary,
                seed=self.seed + 1000 * added + number,
            )

    def wave_tokens(self) -> int:
        """Of all conversations of a wave at its end, at most."""
        most = 0
        for added in self.added:
            turns = self.turns(added)
            grown = (turns - 1) * (added + self.answer)
            most = max(most, self.sessions * (self.shortest + self.longest + grown) // 2)
        return most
