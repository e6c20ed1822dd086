"""Handovers: a scheduler's requests and the pages that peers have, or compute, for them.

`Handovers` is the asking side: it knows which requests get pages from whom, and when they may go
on. `Prefills` is the giving side: it has the scheduler compute what peers ask for. Both only
translate between requests and quire.disagg.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quire.disagg.handover import AskedPrompt, Half, Handover, Stage
from quire.disagg.receiving import Receiver
from quire.engine.messages import CachedTokens, EngineInfo
from quire.engine.request import Request, State
from quire.keys import PrefixKey
from quire.manager import CacheManager, Lease, LoadState, PrefixMatch
from quire.peer.messages import Ask, Found
from quire.types import RequestId

if TYPE_CHECKING:
    from quire.engine.scheduler import Scheduler


class Handovers:
    def __init__(
        self,
        receiver: Receiver,
        manager: CacheManager,
        *,
        prefill: list[str],
        peers: list[str],
        decode: bool,
        restore: bool = True,
    ) -> None:
        """`decode`: prompts are computed by `prefill`, or whom a request names, and not here.
        `restore` = False: of the own tiers only the device is used."""
        self.receiver = receiver
        self._manager = manager
        self._prefill = prefill
        self._peers = peers
        self._decode = decode
        self._restore = restore
        receiver.contacts.name([*prefill, *peers], keep=True)

    def usable(self, match: PrefixMatch) -> PrefixMatch:
        """What of a match may be used."""
        return match if self._restore else match._replace(num_host=0)

    def begin(self, request: Request) -> bool:
        """Get what the request lacks from a peer. False: there is nothing to get, or nobody."""
        lease = request.lease
        assert lease is not None
        if request.for_peer:
            return False
        restore, costs = self._restore, self._manager.costs
        if self._decode:
            sources = request.prefill or self._prefill
        else:
            missing = lease.key.last - lease.tail.end
            few = missing < self._manager.config.threshold_pages
            if few or not costs.worth_asking_peers(missing):
                return False
            sources, restore = self._peers, not costs.peers_beat_store()
        prompt = AskedPrompt(
            request.tokens[: request.length].tobytes(),
            request.salt,
            request.priority,
            request.trace,
        )
        request.handover = self.receiver.begin(
            request.id,
            lease,
            prompt,
            sources,
            compute=self._decode,
            restore=restore,
            is_counted=request.is_counted,
        )
        return True

    def ready(self, request: Request) -> bool:
        """May it be admitted, as far as its peers are concerned?"""
        handover = request.handover
        if handover is None:
            return True
        if handover.stage is Stage.READY:
            if handover.lease.load_state is LoadState.FAILED:  # while others were served
                self._manager.yield_device(handover.lease)
            if not self._decode and handover.lease.prefetch is None:
                self._manager.prefetch(handover.lease)  # peers were first; now for the rest
            return True
        return False

    @property
    def num_waiting(self) -> int:
        """Requests that go on when peers have sent what they lack, and no sooner."""
        return self.receiver.num_waiting

    def admitted(self, request: Request) -> None:
        """It goes on with what is there."""
        self.cancel(request)

    def cancel(self, request: Request) -> None:
        handover, request.handover = request.handover, None
        if handover is not None:
            request.is_counted = handover.is_counted
            self.receiver.cancel(handover)

    def found(self, request: Request) -> CachedTokens | None:
        """Reused tokens, by tier and side; None: no peer had a part in it."""
        handover = request.handover
        if handover is None:
            return None
        return reused(handover, self._manager.config.page_size)


def reused(handover: Handover, page_size: int) -> CachedTokens:
    """Of the pages [0, wanted): those of the own tiers, then those that the peer had. What it
    computed is not among them; and no page counts twice."""
    match = handover.match
    assert match is not None
    restored = handover.restored if handover.restore is not Half.PENDING else 0
    device = min(match.device, restored)
    store = min(handover.landed, max(0, restored - device))
    host = restored - device - store
    end = handover.lease.tail.end
    spans, at = [], 0
    for count in (handover.found.device, handover.found.host, handover.found.store):
        first, last = max(at, restored), min(at + count, end)
        spans.append(max(0, last - first) * page_size)
        at += count
    own = CachedTokens(device * page_size, host * page_size, store * page_size)
    if handover.compute:
        return CachedTokens(own.device, own.host, own.store, 0, *spans)
    prefetch = handover.lease.prefetch
    later = prefetch.num_landed - handover.landed if prefetch is not None else 0
    peer = max(0, end - restored - later)
    return CachedTokens(own.device, own.host, own.store + later * page_size, peer * page_size)


class Prefills:
    """Computes prompts for peers; see quire.disagg.giving.Computes."""

    def __init__(
        self, scheduler: Scheduler, info: EngineInfo, *, clock: Callable[[], float]
    ) -> None:
        self._scheduler = scheduler
        self._info = info
        self._page_size = info.page_size
        self._clock = clock

    def problem(self, ask: Ask) -> str:
        size = ask.last * self._page_size
        overlap = self._info.unit.overlap
        if not 0 <= ask.first <= ask.last or len(ask.tokens) != (size + overlap) * 4:
            return f"pages {ask.first} to {ask.last} do not fit {len(ask.tokens)} bytes of tokens"
        if not size:
            return "the prompt has no page"
        if size > self._info.max_context:
            return f"{size} tokens asked for, the context holds {self._info.max_context}"
        tokens = np.frombuffer(ask.tokens, dtype="<i4")
        if tokens.min() < 0 or tokens.max() >= self._info.vocab_size:
            return f"token ids must be in 0..{self._info.vocab_size - 1}"
        return ""

    def key(self, ask: Ask) -> PrefixKey:
        return PrefixKey(self._info.namespace(ask.salt), np.frombuffer(ask.tokens, dtype="<i4"))

    def is_full(self) -> bool:
        return self._scheduler.is_full

    def begin(self, name: str, ask: Ask) -> str:
        if not self._scheduler.reuse:
            return "this engine reuses nothing: its model failed the check when it was loaded"
        request = Request.of_peer(
            name,
            ask.tokens,
            self._info.namespace(ask.salt),
            priority=ask.priority,
            now=self._clock(),
        )
        refused = self._scheduler.add(request)
        return refused.error if refused is not None else ""

    def lease(self, name: str) -> Lease | None:
        request = self._request(name)
        return request.lease if request is not None else None

    def found(self, name: str) -> Found:
        request, size = self._request(name), self._page_size
        if request is None:
            return Found()
        cached, lease = request.cached, request.lease
        if cached is not None:
            return Found(cached.device // size, cached.host // size, cached.store // size)
        if lease is None:
            return Found()
        # All of it was there, and it is handed over before it was even admitted.
        landed = lease.prefetch.num_landed if lease.prefetch is not None else 0
        store = min(landed, lease.num_host)
        return Found(lease.num_device, lease.num_host - store, store)

    def is_waiting(self, name: str) -> bool:
        request = self._request(name)
        return request is not None and request.state is not State.HOLDING

    def is_kept(self, name: str) -> bool:
        request = self._request(name)
        return request is not None and request.settled

    def failure(self, name: str) -> str:
        request = self._request(name)
        return "it could not be computed" if request is None else request.failure

    def end(self, name: str) -> None:
        self._scheduler.abort(RequestId(name))

    def _request(self, name: str) -> Request | None:
        return self._scheduler.request(RequestId(name))
