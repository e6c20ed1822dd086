"""ComputedForPeers: what was computed for peers, until they have taken it.

Knows requests without an answer of their own: when all of their pages are there, and that nothing
but these is held on to. What is given to whom is quire.disagg's.
"""

from __future__ import annotations

from quire.engine.holds import Holds
from quire.engine.queue import Queue
from quire.engine.request import Request
from quire.manager import CacheManager, Lease, LoadState
from quire.types import NO_SLOT

_SLOTS_TO_KEEP = 3
"""Of recurrent state: what a request begins from, works on, and leaves at the end of its prompt."""


class ComputedForPeers:
    def __init__(
        self, manager: CacheManager, queue: Queue, holds: Holds, *, num_slots: int
    ) -> None:
        """`num_slots`: of recurrent state, on the device."""
        self._manager = manager
        self._queue = queue
        self._holds = holds
        self._num_slots = num_slots

    def take_if_all_there(self, request: Request) -> bool:
        """Nothing is left to compute for a peer: it need not even come to the device."""
        if not request.for_peer:
            return False
        assert request.lease is not None
        if self._manager.admit(request.lease) < request.key.last:
            return False
        if request.origin is not None:
            request.origin.later_device = self._manager.match(request.lease.key).num_device
        self._holds.note_found(request, request.key.last)
        self.take(request)
        return True

    def take(self, request: Request) -> None:
        """All is computed: keep it until the peer has taken it."""
        self._queue.hold(request)
        self._settle(request)

    def settle(self) -> None:
        """Once per step."""
        for request in [r for r in self._queue.holding if not r.settled]:
            self._settle(request)

    def can_keep(self, lease: Lease) -> bool:
        """Is there a place for the state at the end of a prompt? Without it a peer has no use for
        the rest."""
        can = lease.state is not None and self._num_slots >= _SLOTS_TO_KEEP
        if not can or not self._manager.config.snapshots.per_path:
            return True  # it never will be, or need not be
        return self._manager.save_slot(lease) != NO_SLOT

    def _settle(self, request: Request) -> None:
        """Keep its pages in the tree, and nothing else, as soon as all of them are there."""
        manager, before = self._manager, request.lease
        assert before is not None
        if before.load_state is LoadState.FAILED:  # it stands on pages that did not arrive
            self._queue.counters.restarted += 1
            self._holds.begin_again(request)
            return
        self._holds.share(request)
        if before.loads:
            return
        request.lease = manager.acquire(manager.match(request.key), request.id, again=True)
        manager.release(before)
        request.settled = True
        if request.lease.tail.end < request.key.last:
            request.failure = "there was no room to keep the state at the end of the prompt"
