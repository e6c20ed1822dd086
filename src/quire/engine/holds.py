"""Holds: what a request holds of the cache. It looks, shares what it computed, and lets go.

Knows the cache's manager, and where else pages may be had; not who is served when.
"""

from __future__ import annotations

from quire.engine.handovers import Handovers
from quire.engine.layouts import FULL
from quire.engine.queue import Queue
from quire.engine.request import Request, RequestOrigin
from quire.manager import CacheManager


class Holds:
    def __init__(
        self, manager: CacheManager, queue: Queue, remote: Handovers | None, *, reuse: bool
    ) -> None:
        self._manager = manager
        self._queue = queue
        self._remote = remote
        self._reuse = reuse
        self._page_size = manager.config.page_size
        components = {pool.component for pool in manager.pools()}
        self._takes_whole = remote is None and components == {FULL}
        """May what there is of a prompt be all of it? Its last token is computed again then, on the
        keys and values of all, its own included. Other state would be that after it."""
        self.num_let_go = 0
        """How often somebody let go: who found no room before may find it now."""

    def look_up(self, request: Request) -> None:
        """Take a lease on what there is, and start fetching what the store may have."""
        manager, key, remote = (
            self._manager,
            request.lookup_key(whole=self._takes_whole),
            self._remote,
        )
        match = manager.match(key if self._reuse else key[:0])
        if remote is not None:
            match = remote.usable(match)
        again = request.origin is not None
        if not again:
            request.origin = RequestOrigin(match.num_device, match.num_pages)
        request.lease = manager.acquire(
            match, request.id, priority=request.priority, again=again, wish=request.wish
        )
        if remote is not None and remote.begin(request):
            return
        if self._reuse:
            manager.prefetch(request.lease, can_meet=True)

    def note_found(self, request: Request, reused: int) -> None:
        """When it is first admitted: where its first `reused` pages were."""
        if request.cached is not None or request.origin is None:
            return
        request.origin.look(request.lease)
        of_prompt = min(reused, request.num_prompt // self._page_size)
        computed_too = int(not request.for_peer and reused * self._page_size >= request.length)
        request.cached = request.origin.cached(of_prompt, self._page_size, but=computed_too)
        if self._remote is not None:
            request.cached = self._remote.found(request) or request.cached

    def meet(self, request: Request) -> None:
        """Has what it computed come to what is fetched from the back? Then it goes on after that.
        Its page table changes: nothing may be under way on it."""
        lease = request.lease
        assert lease is not None
        if request.flying:
            return
        low = request.computed // self._page_size
        high = self._manager.meetings.met(lease, low)
        if high is not None and high > low:
            request.computed = high * self._page_size
            if request.cached is not None and not request.reported:
                request.cached = request.cached.fetched((high - low) * self._page_size)

    def share(self, request: Request) -> None:
        """Commit the full pages computed so far, so that others can use them."""
        lease = request.lease
        assert lease is not None
        full_pages = request.computed // self._page_size
        if self._reuse and full_pages > lease.num_device:
            # Not a page more: the request has pages for tokens that are still to be computed.
            self._manager.commit(lease, request.key_of(request.computed)[:full_pages])

    def let_go(self, request: Request) -> None:
        """Of all that it holds; what batches under way compute for it will not be taken in."""
        if self._remote is not None:
            self._remote.cancel(request)
        request.ground()
        if request.lease is not None:
            if request.origin is not None:
                request.origin.look(request.lease)
            self._manager.release(request.lease)
            request.lease = None
            self.num_let_go += 1

    def begin_again(self, request: Request) -> None:
        """Back to waiting, with all its tokens and without its pages."""
        self.let_go(request)
        request.computed = 0
        self._queue.requeue(request)
