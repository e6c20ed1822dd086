"""What happened, as numbers by name. Thread-safe. Knows no store.

Of a PageStore:

    read:STATUS written:STATUS   pages asked for, pages offered, by outcome; those that were there
                                 already are `written:ok`
    read_bytes written_bytes     of pages that were OK
    packed_bytes                 what the written ones took in the store, if they are packed
    skipped_pages                not written because the store had them
    probed_pages probe_hits
    mismatch:REASON              pages that came back but were not what was asked for
    error:TYPE                   calls that the store failed by raising
    declined:REASON              calls not made at all: breaker_open, stalled, closed; late, of a
                                 probe that had no time left
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from quire.types import PageStatus


class StoreCounters:
    """One lock, taken once per call."""

    def __init__(self, *names: str) -> None:
        """`names` are there from the start, as 0."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    def add(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._counts.update(counts)

    def count(self, name: str) -> None:
        self.add({name: 1})

    def error(self, error: BaseException) -> None:
        self.count(f"error:{type(error).__name__}")

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


def by_outcome(what: str, statuses: Sequence[PageStatus]) -> dict[str, int]:
    """How many of each status. Hashing an enum is slow, and most are OK."""
    num_ok = statuses.count(PageStatus.OK)
    counts = {f"{what}:ok": num_ok} if num_ok else {}
    if num_ok < len(statuses):
        rest = Counter(status for status in statuses if status is not PageStatus.OK)
        counts |= {f"{what}:{status.name.lower()}": n for status, n in rest.items()}
    return counts
