"""What a PageStore has seen, as numbers with reasons. Knows no store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.store.base import StoreStats
from quire.store.breaker import BreakerState
from quire.store.codec import Mismatch
from quire.types import PageStatus


@dataclass(frozen=True, slots=True)
class PageStoreStats:
    """A snapshot. Dicts hold only what happened at least once."""

    read: dict[PageStatus, int] = field(default_factory=dict)
    """Pages asked for, by outcome."""
    written: dict[PageStatus, int] = field(default_factory=dict)
    """Pages offered, by outcome; OK includes those that were there already."""
    read_bytes: int = 0
    written_bytes: int = 0
    skipped_pages: int = 0
    """Pages not written because the store had them."""
    probed_pages: int = 0
    probe_hits: int = 0
    mismatches: dict[Mismatch, int] = field(default_factory=dict)
    """Pages that came back but were not what was asked for, by reason."""
    errors: dict[str, int] = field(default_factory=dict)
    """Calls the store failed by raising, by exception type."""
    declined: dict[str, int] = field(default_factory=dict)
    """Calls not made at all: breaker_open, stalled, closed."""
    breaker: BreakerState = BreakerState.CLOSED
    breaker_opened: int = 0
    store: StoreStats = field(default_factory=StoreStats)

    def flat(self) -> dict[str, int]:
        """What was counted, by name; what the store itself says is not part of it."""
        counts = {
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "skipped_pages": self.skipped_pages,
            "probed_pages": self.probed_pages,
            "probe_hits": self.probe_hits,
            "breaker_opened": self.breaker_opened,
            "breaker_is_open": int(self.breaker is not BreakerState.CLOSED),
        }
        counts |= {f"read:{status.name.lower()}": n for status, n in self.read.items()}
        counts |= {f"written:{status.name.lower()}": n for status, n in self.written.items()}
        counts |= {f"mismatch:{reason.value}": n for reason, n in self.mismatches.items()}
        counts |= {f"error:{name}": n for name, n in self.errors.items()}
        counts |= {f"declined:{reason}": n for reason, n in self.declined.items()}
        return counts


class Counters:
    """The live side of PageStoreStats. Thread-safe; one lock, taken once per call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: Counter[PageStatus] = Counter()
        self._written: Counter[PageStatus] = Counter()
        self._mismatches: Counter[Mismatch] = Counter()
        self._errors: Counter[str] = Counter()
        self._declined: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def read(self, statuses: Sequence[PageStatus], page_bytes: int) -> None:
        with self._lock:
            num_ok = _count(self._read, statuses)
            self._bytes["read"] += page_bytes * num_ok

    def wrote(self, statuses: Sequence[PageStatus]) -> None:
        with self._lock:
            _count(self._written, statuses)

    def stored(self, num_bytes: int, num_skipped: int) -> None:
        with self._lock:
            self._bytes["written"] += num_bytes
            self._bytes["skipped"] += num_skipped

    def probed(self, num_pages: int, num_hits: int) -> None:
        with self._lock:
            self._bytes["probed"] += num_pages
            self._bytes["hits"] += num_hits

    def mismatch(self, reason: Mismatch) -> None:
        with self._lock:
            self._mismatches[reason] += 1

    def error(self, error: BaseException) -> None:
        with self._lock:
            self._errors[type(error).__name__] += 1

    def declined(self, reason: str) -> None:
        with self._lock:
            self._declined[reason] += 1

    def snapshot(
        self, breaker: BreakerState, breaker_opened: int, store: StoreStats
    ) -> PageStoreStats:
        with self._lock:
            return PageStoreStats(
                read=dict(self._read),
                written=dict(self._written),
                read_bytes=self._bytes["read"],
                written_bytes=self._bytes["written"],
                skipped_pages=self._bytes["skipped"],
                probed_pages=self._bytes["probed"],
                probe_hits=self._bytes["hits"],
                mismatches=dict(self._mismatches),
                errors=dict(self._errors),
                declined=dict(self._declined),
                breaker=breaker,
                breaker_opened=breaker_opened,
                store=store,
            )


def _count(counter: Counter[PageStatus], statuses: Sequence[PageStatus]) -> int:
    """Add to `counter`; returns how many were OK. Hashing an enum is slow, and most are OK."""
    num_ok = statuses.count(PageStatus.OK)
    if num_ok:
        counter[PageStatus.OK] += num_ok
    if num_ok < len(statuses):
        counter.update(status for status in statuses if status is not PageStatus.OK)
    return num_ok
