"""EventLog: whoever comes late knows in the end what is there, in pieces, while it changes."""

import random

import pytest

from quire.engine.eventlog import KEYS_PER_ANSWER, EventLog
from quire.manager import CacheEvent, EventBatch, EventKind

STORED, REMOVED = EventKind.STORED, EventKind.REMOVED


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def event(kind: EventKind, *numbers: int, tier: str = "host") -> CacheEvent:
    return CacheEvent(kind, tier, "full", b"".join(map(key, numbers)))


class Log:
    """One that has a model: what is there, by tier."""

    def __init__(self, kept: int = 1 << 15) -> None:
        self.log = EventLog(kept)
        self.there: set[tuple[str, bytes]] = set()

    def take(self, *events: CacheEvent, lost: int = 0) -> None:
        for each in events:
            apply(self.there, each.kind.value, each.tier, each.keys)
        self.log.take_in(EventBatch(list(events), lost), self.present)

    def present(self) -> list[CacheEvent]:
        return [CacheEvent(STORED, tier, "full", keys) for tier, keys in sorted(self.there)]


class Reader:
    def __init__(self, log: Log) -> None:
        self.log = log.log
        self.known: set[tuple[str, bytes]] = set()
        self.last = self.cursor = 0
        self.largest = self.beginnings = 0

    def ask(self) -> bool:
        """Is there more?"""
        found = self.log.since(self.last, self.cursor)
        if not found.complete:
            self.known.clear()
            self.beginnings += 1
        for each in found.events:
            apply(self.known, each.kind, each.tier, each.keys)
        self.largest = max(self.largest, sum(len(each.keys) // 32 for each in found.events))
        self.last, self.cursor = found.last, found.cursor
        return found.more

    def catch_up(self) -> None:
        while self.ask():
            pass


def apply(known: set[tuple[str, bytes]], kind: str, tier: str, keys: bytes) -> None:
    pages = {(tier, keys[i : i + 32]) for i in range(0, len(keys), 32)}
    if kind == "stored":
        known |= pages
    else:
        known -= pages


def test_who_comes_after_fifty_thousand_events_knows_all():
    log = Log()
    for number in range(50_000):
        log.take(event(STORED, number))
    reader = Reader(log)
    reader.catch_up()
    assert reader.known == log.there
    assert reader.largest < 2 * KEYS_PER_ANSWER
    assert reader.beginnings == 1


def test_half_a_million_pages_are_told_in_pieces_of_a_few_thousand():
    log = Log(kept=100)
    for first in range(0, 500_000, 500):
        log.take(event(STORED, *range(first, first + 500), tier="device"))
    reader = Reader(log)
    reader.catch_up()
    assert len(reader.known) == 500_000
    assert reader.largest < 2 * KEYS_PER_ANSWER


def test_one_event_of_very_many_pages_is_told_in_pieces_too():
    log = Log()
    log.take(event(STORED, *range(30_000)))
    reader = Reader(log)
    reader.catch_up()
    assert reader.known == log.there
    assert reader.largest < 2 * KEYS_PER_ANSWER
    assert reader.beginnings == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_between_two_pieces_is_known_in_the_end(seed):
    rng = random.Random(seed)
    log = Log(kept=rng.choice([50, 2000]))
    log.take(event(STORED, *range(20_000)))
    for number in range(log.log._events.maxlen + 1):
        log.take(event(STORED, number, tier="device"))
    reader = Reader(log)
    while reader.ask():
        for _ in range(rng.randrange(12)):
            numbers = [rng.randrange(21_000) for _ in range(rng.randrange(1, 9))]
            tier = rng.choice(["device", "host", "store"])
            change = event(rng.choice([STORED, REMOVED]), *numbers, tier=tier)
            if tier != "store":
                log.take(change, lost=3 * (rng.random() < 0.005))
    assert reader.known == log.there


def test_what_only_some_of_the_model_has_is_not_told():
    log = Log()
    log.log.take_in(EventBatch([CacheEvent(STORED, "host", "window", key(1))], 0), list)
    reader = Reader(log)
    reader.catch_up()
    assert reader.known == set()


def test_events_that_were_lost_inside_are_made_good_by_what_is_present():
    log = Log()
    log.take(event(STORED, 1, 2))
    reader = Reader(log)
    reader.catch_up()
    log.there = {("device", key(7))}  # the rest went, and nobody was told
    log.take(event(STORED, 8), lost=5)
    reader.catch_up()
    assert reader.known == {("device", key(7)), ("host", key(8))}
