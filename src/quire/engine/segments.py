"""Segments: how much of a running request is computed next, and on which pages.

Knows leases, pages and recurrent state; not which requests are chosen.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.engine.batch import Segment
from quire.engine.for_peers import ComputedForPeers
from quire.engine.grammar import Told
from quire.engine.grammar.told import MAX_AT_ONCE
from quire.engine.request import Request
from quire.manager import CacheManager, Lease, LeaseState
from quire.types import NO_SLOT, PAGE_ID_BYTES, PageIds, RequestId


class Segments:
    def __init__(self, manager: CacheManager, kept: ComputedForPeers, *, reuse: bool) -> None:
        self._manager = manager
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

    def make(self, request: Request, count: int) -> Segment:
        """Its next `count` tokens, for which it has pages."""
        lease = request.lease
        assert lease is not None
        start = request.computed + request.flying
        end = start + count
        follows = request.place if start == request.length else -1
        num_pages = -(-end // self._page_size)
        if lease.meeting is not None:
            self._manager.meetings.computing(lease, num_pages)
        segment = Segment(
            id=request.id,
            tokens=request.tokens[start:end].tobytes() if follows < 0 else bytes(4),
            start=start,
            pages=PageIds(lease.pages[: num_pages * PAGE_ID_BYTES]),
            loads=sorted(lease.loads) if lease.loads else [],
            row=request.row() if end == request.length + request.draws else None,
            follows=follows,
            is_there=start < lease.num_device * self._page_size,
        )
        return segment if lease.state is None else self._with_state(segment, lease, lease.state)

    def with_proposals(
        self, request: Request, segment: Segment, proposed: Sequence[int], branches: int = 0
    ) -> Segment:
        """And what may come after its tokens, for which the request has pages: a tree."""
        end = segment.start + segment.num_tokens + len(proposed)
        return msgspec.structs.replace(
            segment,
            tokens=segment.tokens + array("i", proposed).tobytes(),
            drafts=len(proposed),
            branches=branches,
            allowed=[] if request.held is None else request.held.allowed(proposed)[1:],
            **self._room(request, end),
        )

    def tell(self, decoding: Sequence[Request], chosen: dict[RequestId, Segment]) -> int:
        """Put what answers were told to say behind the segments that were chosen for them, as far
        as there is room and their logits are few. Returns how many tokens. A recurrent state takes
        them one by one."""
        total = 0
        for request in decoding:
            if not isinstance(request.held, Told) or request.flying or request.id not in chosen:
                continue
            told = request.held.coming()[: MAX_AT_ONCE - total]
            if told and request.can_be_proposed and self.extend(request, 1 + len(told)):
                segment = chosen[request.id]
                chosen[request.id] = self.with_proposals(request, segment, told)
                total += len(told)
        return total

    def with_ahead(self, request: Request, segment: Segment, ahead: int) -> Segment:
        """And so many tokens to propose after it, for which the request has pages. Ranks that
        propose want to know the token after each segment, where it is known."""
        end = segment.start + segment.num_tokens
        known = end - segment.drafts
        return msgspec.structs.replace(
            segment,
            ahead=ahead,
            after=int(request.tokens[known]) if known < request.num_known else -1,
            **self._room(request, end + ahead),
        )

    def _room(self, request: Request, end: int) -> dict[str, Any]:
        """Its pages for its first `end` tokens, as fields of a segment."""
        lease = request.lease
        assert lease is not None
        num_pages = -(-end // self._page_size)
        fields: dict[str, Any] = {"pages": PageIds(lease.pages[: num_pages * PAGE_ID_BYTES])}
        return fields if lease.state is None else fields | _window(lease.state)

    def _with_state(self, segment: Segment, lease: Lease, state: LeaseState) -> Segment:
        fields = _window(state)
        if state.recurrent is not None:
            end = segment.start + segment.num_tokens
            kept = self._reuse and end % self._page_size == 0
            fields |= {
                "state": state.recurrent.slot,
                "restore": state.recurrent.restore,
                "save": self._manager.save_slot(lease) if kept else NO_SLOT,
            }
        return msgspec.structs.replace(segment, **fields)


def _window(state: LeaseState) -> dict[str, Any]:
    """As fields of a segment."""
    if state.window is None:
        return {}
    return {"window": state.window.pages, "window_first": state.window.first}
