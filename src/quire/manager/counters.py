"""What the manager counts: every outcome has a name, every decline a reason."""

from __future__ import annotations

import enum
from collections import Counter


class Decline(enum.StrEnum):
    """Why a prefetch did not happen, or ended with nothing."""

    NO_STORE = "no_store"
    NO_HOST = "no_host"
    BELOW_THRESHOLD = "below_threshold"
    SHORT_HIT = "short_hit"
    """The store has fewer pages than the threshold asks for."""
    BUDGET = "budget"
    """Fetches in flight hold all the pages they may."""
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"
    HOST_FULL = "host_full"
    """What fits after eviction is below the threshold."""
    ALLOCATION_FAILED = "allocation_failed"
    """The allocation after truncation failed as well."""
    PROBE_FAILED = "probe_failed"
    """No answer in time, or none that makes sense."""
    ABORTED = "aborted"
    WORKER_LOST = "worker_lost"


class Count(enum.StrEnum):
    """Counters in pages unless the name says otherwise."""

    MATCHED_DEVICE = "matched_device_pages"
    MATCHED_HOST = "matched_host_pages"
    COMMITTED = "committed_pages"
    DUPLICATE = "duplicate_pages"
    ADOPTED = "adopted_pages"
    EVICTED_DEVICE = "evicted_device_pages"
    EVICTED_HOST = "evicted_host_pages"
    EVICTED_SPARE = "evicted_spare_pages"
    """Host copies of pages that the device has too: nothing was lost."""
    DROPPED = "dropped_pages"
    """Left their last tier."""
    BACKED_UP = "backed_up_pages"
    BACKUP_DEFERRED = "backup_deferred_pages"
    """Hot on the device and the host is full: copied out when they grow cold."""
    BACKUP_SKIPPED = "backup_skipped_pages"
    """Not copied to the host for want of room there."""
    BACKUP_FAILED = "backup_failed_pages"
    LOADED = "loaded_pages"
    LOAD_FAILED = "load_failed_pages"
    LOAD_DECLINED = "load_declined_pages"
    """On the host, but the device had no room: recomputed."""
    WRITTEN = "written_pages"
    WRITE_RETRIED = "write_retried_pages"
    WRITE_FAILED = "write_failed_pages"
    FETCHED = "fetched_pages"
    FETCH_MISSED = "fetch_missed_pages"
    """Promised by the probe, not delivered by the fetch."""
    PREFETCH_EXACT = "prefetch_exact_requests"
    PREFETCH_EVICTED = "prefetch_evicted_requests"
    PREFETCH_TRUNCATED = "prefetch_truncated_requests"
    ALLOCATION_FAILURES = "device_allocation_failures"
    OVERDUE = "overdue_operations"
    LATE_REPORTS = "late_reports"


_DECLINED = {reason: f"prefetch_declined:{reason}" for reason in Decline}


class Counters:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: Count, amount: int = 1) -> None:
        self._counts[name] += amount

    def decline(self, reason: Decline) -> None:
        self._counts[_DECLINED[reason]] += 1

    def status(self, kind: str, status: str, amount: int) -> None:
        """Pages of operations of `kind` that ended with a status other than OK."""
        self._counts[f"{kind}:{status}"] += amount

    def __getitem__(self, name: Count) -> int:
        return self._counts[name]

    def declined(self, reason: Decline) -> int:
        return self._counts[_DECLINED[reason]]

    def snapshot(self) -> dict[str, int]:
        return {name: count for name, count in sorted(self._counts.items()) if count}
