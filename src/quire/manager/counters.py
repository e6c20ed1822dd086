"""What the manager counts: every outcome has a name, every decline a reason."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, fields


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
    NO_SLOT = "no_slot"
    """The host has no room for the recurrent snapshot, or the window, that belongs to it."""
    NO_STATE = "no_state"
    """The store has pages, but no window or snapshot at which they could be used."""
    ALLOCATION_FAILED = "allocation_failed"
    """The allocation after truncation failed as well."""
    PROBE_FAILED = "probe_failed"
    """No answer in time, or none that makes sense."""
    ABORTED = "aborted"
    WORKER_LOST = "worker_lost"


class Fit(enum.StrEnum):
    """How a fetch got its host pages."""

    EXACT = "exact"
    """They were free."""
    EVICTED = "evicted"
    """The shortfall was evicted."""
    TRUNCATED = "truncated"
    """It was cut to what could be had."""


@dataclass(slots=True)
class Counters:
    """Counts since the start, in pages unless the name says otherwise."""

    matched_device_pages: int = 0
    matched_host_pages: int = 0
    committed_pages: int = 0
    """Computed by requests and shared."""
    duplicate_pages: int = 0
    """Computed or fetched although the tree had them by then: freed."""
    evicted_device_pages: int = 0
    evicted_host_pages: int = 0
    evicted_spare_pages: int = 0
    """Host copies of pages that the device has too: nothing was lost."""
    evicted_own_pages: int = 0
    """Among these: of tenants that had their quota, for the same tenant's."""
    dropped_pages: int = 0
    """Left their last tier."""
    useless_pages: int = 0
    """Given up although there was room: outside every window, or without their snapshot."""
    backed_up_pages: int = 0
    backup_deferred_pages: int = 0
    """Hot on the device and the host is full: copied out when they grow cold."""
    backup_skipped_pages: int = 0
    """Not copied to the host for want of room there."""
    backup_failed_pages: int = 0
    loaded_pages: int = 0
    load_failed_pages: int = 0
    load_declined_pages: int = 0
    """On the host, but the device had no room: recomputed."""
    written_pages: int = 0
    write_retried_pages: int = 0
    write_failed_pages: int = 0
    fetched_pages: int = 0
    fetch_missed_pages: int = 0
    """Promised by the probe, not delivered by the fetch."""
    streams: int = 0
    """Hits that the host could not hold at once, brought through it in parts, in requests."""
    streamed_pages: int = 0
    """What came so."""
    meetings: int = 0
    """Prompts computed from the front while pages came from the back, in requests."""
    met_pages: int = 0
    """What came so, and was used."""
    overtaken_pages: int = 0
    """Asked for so, and computed before they had come."""
    unsound_meetings: int = 0
    """Requests that would have been faster so, of a model whose state is not that of full pages
    alone."""
    exported_pages: int = 0
    """That peers were let read, of all components."""
    received_pages: int = 0
    """That came from peers, of all components."""
    intake_waits: int = 0
    """Steps in which pages that a peer offers had no room on the host."""
    snapshots: int = 0
    """Recurrent states shared, in snapshots."""
    snapshots_skipped: int = 0
    """Not taken for want of a slot."""
    snapshots_over_budget: int = 0
    """Given up because their path had enough."""
    audited_pages: int = 0
    """Computed again in idle time, and compared with what the tiers hold."""
    device_allocation_failures: int = 0
    overdue_operations: int = 0
    late_reports: int = 0
    fetched: Counter[Fit] = field(default_factory=Counter)
    """Prefetches that fetched, in requests, by how they got their pages."""
    declined: Counter[Decline] = field(default_factory=Counter)
    """Prefetches that did not happen, in requests, by reason."""
    faults: Counter[str] = field(default_factory=Counter)
    """Pages that ended otherwise than OK, by "operation:status"."""

    def snapshot(self) -> dict[str, int]:
        """Everything that is not zero, flat, by name."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        for fit, count in counts.pop("fetched").items():
            counts[f"prefetch_fetched:{fit}"] = count
        for reason, count in counts.pop("declined").items():
            counts[f"prefetch_declined:{reason}"] = count
        counts |= counts.pop("faults")
        return {name: count for name, count in sorted(counts.items()) if count}
