"""Segments: how much of a running request is computed next, and on which pages.

Knows leases, pages and recurrent state; not which requests are chosen.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.engine.batch import Segment
from quire.engine.kept import Kept
from quire.engine.request import Request
from quire.manager import CacheManager, Lease, LeaseState
from quire.types import NO_SLOT, PAGE_ID_BYTES, PageIds


class Segments:
    def __init__(
        self, manager: CacheManager, kept: Kept, *, reuse: bool, pairs: bool = False
    ) -> None:
        """`pairs`: ranks want to know which token comes after a segment, where that is known."""
        self._manager = manager
        self._pairs = pairs
        self._kept = kept
        self._reuse = reuse
        self._page_size = manager.config.page_size

    def size(self, request: Request, budget: int) -> int:
        """How many tokens of its prompt to compute next; 0: what comes next is fetched, and not
        there yet, or to be met when what is under way has ended. A recurrent state can be kept
        where a batch ends and nowhere else, so chunks then end at page boundaries, and at
        checkpoints."""
        if not self._reuse:
            return request.remaining
        count = min(budget, request.remaining)
        lease, size = request.lease, self._page_size
        assert lease is not None
        start = request.next_start
        if lease.meeting is not None:
            meetings, is_computed = self._manager.meetings, not request.flying
            front = meetings.front(lease, start // size, is_computed=is_computed)
            return min(count, front * size - start)
        if lease.state is None or lease.state.recurrent is None:
            return count
        first, last = start // size, (start + count) // size
        if last == first:
            return count
        return self._manager.next_stop(lease, first, last) * size - start

    def extend(self, request: Request, count: int) -> bool:
        """Have pages for the next `count` tokens. False: there are none."""
        lease, end = request.lease, request.next_start + count
        assert lease is not None
        missing = request.missing_pages(end, self._page_size)
        if missing > 0 and not self._manager.extend(lease, missing):
            return False
        if not self._manager.cover(lease, -(-end // self._page_size)):
            return False
        return not request.for_peer or end < request.length or self._kept.can_keep(lease)

    def make(
        self, request: Request, count: int, proposed: Sequence[int] = (), ahead: int = 0
    ) -> Segment:
        """Its next `count` tokens, and what is proposed to come after them, and how many are to be
        proposed then; it has pages for all of these."""
        lease = request.lease
        assert lease is not None
        start, end = request.next_start, request.next_start + count
        follows = request.place if start == request.length else -1
        tokens = request.tokens[start:end].tobytes() if follows < 0 else bytes(4)
        num_pages = -(-(end + len(proposed) + ahead) // self._page_size)
        after = -1
        if self._pairs and end < request.num_known:
            after = int(request.tokens[end])
        if lease.meeting is not None:
            self._manager.meetings.computing(lease, num_pages)
        pages = lease.pages[: num_pages * PAGE_ID_BYTES]
        draws = end == request.length + request.draws
        masks = []
        if request.held is not None and draws:
            masks = request.held.allowed(proposed)
        segment = Segment(
            id=request.id,
            tokens=tokens + array("i", proposed).tobytes() if proposed else tokens,
            start=start,
            pages=PageIds(pages),
            loads=sorted(lease.loads),
            row=request.row(*masks[:1]) if draws else None,
            follows=follows,
            drafts=len(proposed),
            ahead=ahead,
            allowed=masks[1:],
            after=after,
        )
        return segment if lease.state is None else self._with_state(segment, lease, lease.state)

    def _with_state(self, segment: Segment, lease: Lease, state: LeaseState) -> Segment:
        fields: dict[str, Any] = {}
        if state.window is not None:
            fields |= {"window": state.window.pages, "window_first": state.window.first}
        if state.recurrent is not None:
            end = segment.start + segment.num_tokens
            kept = self._reuse and end % self._page_size == 0
            fields |= {
                "state": state.recurrent.slot,
                "restore": state.recurrent.restore,
                "save": self._manager.save_slot(lease) if kept else NO_SLOT,
            }
        return msgspec.structs.replace(segment, **fields)
