"""EventLog: what came into the cache's tiers and went from them, numbered, for whoever asks.

    asked for all after     answered
    a number that is kept   the events after it
    one that is forgotten   "start over": what is present now, and then the events since

What is present is told in pieces, each by the cursor that came with the one before, while events
go on. A piece says what is true when it is told; what happens to its pages afterwards is among the
events since the first piece, and they say the same twice without harm. So whoever applies all
pieces, and then these events, has what there is.

    start over ──▶ piece, piece, …, the last (no cursor) ──▶ events since the first piece
         ▲                                                        │
         └─────────── these are forgotten already ◀───────────────┘

No answer has more than a few thousand keys, so that neither a step nor whoever reads it is held up.
Knows full pages of device and host; what a store has, all who share it know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from quire.engine.messages import Event, Events
from quire.manager import CacheEvent, EventBatch, EventKind
from quire.types import PAGE_KEY_BYTES

KEPT_EVENTS = 1 << 15
KEYS_PER_ANSWER = 4096
"""One that begins below that is finished: an answer can have up to twice as many."""
_SHARDS = 1024
_TIERS = {"device": 1, "host": 2}
_FULL = "full"


class EventLog:
    def __init__(self, kept: int = KEPT_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._last = 0
        self._present = _Present()

    def take_in(self, batch: EventBatch, present: Callable[[], Iterable[CacheEvent]]) -> None:
        """What has happened. `present`: all that there is, for when some of it was lost."""
        if batch.lost:
            self._last += batch.lost
            self._events.clear()
            self._present = _Present()
            for event in present():
                self._present.apply(event)
        for event in batch.events:
            if event.component == _FULL:
                self._present.apply(event)
                for keys in _cut(event.keys):
                    self._last += 1
                    self._events.append(Event(event.kind.value, event.tier, keys))

    def since(self, number: int, cursor: int = 0) -> Events:
        """`cursor`: of the last answer; 0: it had none."""
        oldest = self._last - len(self._events)
        if not oldest <= number <= self._last:
            piece, following = self._present.piece(0)
            return Events(self._last, piece, complete=False, more=True, cursor=following)
        if cursor:
            piece, following = self._present.piece(cursor)
            return Events(number, piece, complete=True, more=True, cursor=following)
        events: list[Event] = []
        num_keys = 0
        for event in islice(self._events, number - oldest, None):
            if num_keys >= KEYS_PER_ANSWER:
                break
            events.append(event)
            num_keys += len(event.keys) // PAGE_KEY_BYTES
        last = number + len(events)
        return Events(last, events, complete=True, more=last < self._last)


class _Present:
    """The pages that there are, in shards by key: a shard is told as a whole, so no change between
    two pieces can hide a page that is there all the time."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        """By page key: the tiers that have it, as bits."""

    def apply(self, event: CacheEvent) -> None:
        bit = _TIERS.get(event.tier)
        if bit is None or event.component != _FULL:
            return
        is_stored = event.kind is EventKind.STORED
        keys, shards = event.keys, self._shards
        for at in range(0, len(keys), PAGE_KEY_BYTES):
            shard = shards[(keys[at] << 8 | keys[at + 1]) % _SHARDS]
            key = keys[at : at + PAGE_KEY_BYTES]
            if is_stored:
                shard[key] = shard.get(key, 0) | bit
            elif left := shard.get(key, 0) & ~bit:
                shard[key] = left
            else:
                shard.pop(key, None)

    def piece(self, cursor: int) -> tuple[list[Event], int]:
        """Pages from there on, and the next cursor; 0: that was all."""
        found: list[tuple[bytes, int]] = []
        at = cursor
        while at < _SHARDS and len(found) < KEYS_PER_ANSWER:
            found += self._shards[at].items()
            at += 1
        stored = EventKind.STORED.value
        told = (
            Event(stored, tier, b"".join([key for key, bits in found if bits & bit]))
            for tier, bit in _TIERS.items()
        )
        return [event for event in told if event.keys], at if at < _SHARDS else 0


def _cut(keys: bytes) -> Iterable[bytes]:
    """Into what one answer can hold."""
    step = KEYS_PER_ANSWER * PAGE_KEY_BYTES
    return [keys] if len(keys) <= step else [keys[i : i + step] for i in range(0, len(keys), step)]
