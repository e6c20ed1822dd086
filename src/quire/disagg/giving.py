"""Giver: gives peers the pages they ask for, computing them first if need be. The prefill side.

Knows the cache's manager and messages; neither sockets nor the scheduler, which it reaches through
`Computes`. What was offered stays until the receiver says Done or Abort, is gone, or has said
nothing for too long. Every message may come twice, late, or before an earlier one: each names its
hand-over, and what is over is not begun again, nor what was given up before it was heard of.

    queued ──room──▶ begun ──all granted──▶ completed ──Done, Abort, link gone, silence──▶ over
                       └──cannot be computed──▶ Refused, over

A step looks at those that are begun and not completed, and at those whose time has come; how many
wait makes no difference to it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.disagg.host_budget import HostBudget, PageClaim, PageCounts, claim_of
from quire.keys import PrefixKey
from quire.manager import CacheManager, Export, Lease
from quire.peer.messages import (
    Abort,
    Ask,
    Complete,
    Done,
    Found,
    Offer,
    PeerMessage,
    Refused,
    Repair,
    Skip,
    Wait,
)
from quire.types import RequestId, split_keys

_MAX_HANDOUTS = 4096
_PACE_SHARE = 0.2
"""Of a measurement, in the mean of how long a page takes."""
_REMEMBERED = 8192
"""Hand-overs that are over and still known by name."""


class Computes(Protocol):
    """Who computes prompts."""

    def problem(self, ask: Ask) -> str:
        """Why it cannot be taken at all; empty: it can."""

    def key(self, ask: Ask) -> PrefixKey: ...

    def is_full(self) -> bool:
        """Has it as many to compute as it may? It will not stay so."""

    def begin(self, name: str, ask: Ask) -> str:
        """Start computing, under this name. A reason if that is not possible."""

    def lease(self, name: str) -> Lease | None:
        """What holds the prefix, so far as it is computed; None: not begun, or begun again."""

    def found(self, name: str) -> Found:
        """What of it was there before."""

    def is_waiting(self, name: str) -> bool:
        """Is it queued, or being computed?"""

    def is_kept(self, name: str) -> bool:
        """Is all of it computed, and in the tree?"""

    def failure(self, name: str) -> str:
        """Why it will never be computed; empty: it may."""

    def end(self, name: str) -> None:
        """It is not needed any more; any state, any time."""


@dataclass(slots=True, eq=False)
class Handout:
    link: str
    ask: Ask
    name: str
    export: Export
    lease: Lease | None
    """Of its own, if nothing is computed for it."""
    found: Found
    need: PageCounts
    """On the host."""
    first: int
    """Of the pages that it needs there."""
    heard_s: float
    began_s: float
    offers: int = 0
    repair: int = 0
    """Number of the last repair asked for."""
    completed: bool = False
    """Everything asked for so far was offered."""
    begun: bool = False
    """It has them, and is computed if it is to be; those that wait have nothing."""
    said_s: float = 0.0
    """When the receiver last heard of it."""
    claim: PageClaim | None = None
    """Of what it needs; made when it is the next to begin."""
    place: int = 0
    """Pages that had been queued before it, of all that ever were."""


def describe_handout(handout: Handout, now: float) -> dict[str, str | int | float]:
    """One hand-over as who asked for it has it, for a log line. Sizes in pages."""
    return {
        "id": handout.ask.id,
        "peer": handout.link,
        "first": handout.ask.first,
        "last": handout.ask.last,
        "offers": handout.offers,
        "completed": int(handout.completed),
        "seconds": round(now - handout.began_s, 4),
    }


class Giver:
    def __init__(
        self,
        manager: CacheManager,
        computes: Computes,
        *,
        clock: Callable[[], float],
        send: Callable[[str, PeerMessage], bool],
        computing: bool = True,
        ticket: Callable[[int], bytes] = lambda _grant: b"",
        on_end: Callable[[Handout], None] = lambda _handout: None,
    ) -> None:
        """`computing` = False: only what is there is given. `ticket`: what the reader of a grant is
        to show. `on_end`: told of every hand-over that ends, however."""
        self._manager = manager
        self._computes = computes
        self._clock = clock
        self._send = send
        self._computing = computing
        self._ticket = ticket
        self._on_end = on_end
        self.open: dict[tuple[str, str], Handout] = {}
        self._over: dict[tuple[str, str], None] = {}
        self._queued: OrderedDict[Handout, None] = OrderedDict()
        """Those that wait for room, in the order of their coming."""
        self._active: dict[Handout, None] = {}
        """Begun, and not completed."""
        self._on_device: dict[Handout, None] = {}
        """Completed, and perhaps still holding device pages that the host has too."""
        self._due: list[tuple[float, int, Handout]] = []
        """When to look at each, though nothing happened: a heap, an entry for each that is open,
        and one more for each of its repairs; and some of those that are over."""
        self._numbers = itertools.count()
        self._come_pages = 0
        self._gone_pages = 0
        """Pages that have ever been queued, and that are not any more."""
        self._pace_s = 0.0
        """How long it takes until a page's room is given back, per page; 0: not known."""
        self._freed_s = 0.0
        self._outgoing: list[tuple[Handout, PeerMessage]] = []
        self._budget = HostBudget(manager)
        """What those that have begun need."""
        self._moved_s = 0.0
        """When anything was last granted, or given back."""
        self.is_draining = False
        """Nothing new is begun for anybody: the engine is to stop."""
        self.served = 0
        """Hand-overs that ended with Done."""

    def received(self, link: str, message: Ask | Skip | Repair | Wait | Done | Abort) -> None:
        name = (link, message.id)
        handout = self.open.get(name)
        if handout is not None:
            handout.heard_s = self._clock()
        match message:
            case Ask():
                if handout is None and name not in self._over:
                    self._begin(link, message)
            case Skip(_, first):
                if handout is not None:
                    self._skip(handout, first)
            case Repair(_, number, first, last):
                if handout is None:
                    self._refuse(link, message.id, "there is no such hand-over (any more)")
                elif number > handout.repair and 0 <= first < last <= handout.export.last:
                    handout.repair = number
                    self._repair(handout, first, last)
            case Wait():
                pass
            case Done() | Abort():
                if handout is None:
                    self._remember_over(link, message.id)
                else:
                    self.served += isinstance(message, Done)
                    self._end(handout)

    def disconnected(self, link: str) -> None:
        for handout in [h for h in self.open.values() if h.link == link]:
            self._end(handout)

    def advance(self) -> None:
        """Once per step: grant what has become readable. What is to be said about it is kept until
        `flush`: first the workers must know."""
        while self._queued and self._may_begin(first := next(iter(self._queued))):
            # In the order of their coming: a small one that overtakes may do so for ever.
            self._start(first)
        for handout in list(self._active):
            if self._is_open(handout):
                self._advance(handout)
        for handout in list(self._on_device):
            self._let_go_of_device(handout)
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            handout = heapq.heappop(self._due)[2]
            if self._is_open(handout):
                self._look(handout, now)

    def flush(self) -> None:
        """Say what there is to say; the workers have been told."""
        outgoing, self._outgoing = self._outgoing, []
        for handout, message in outgoing:
            if self._is_open(handout) and not self._send(handout.link, message):
                self._end(handout)  # it will not be missed: the link is gone, or as good as

    def next_deadline(self) -> float | None:
        while self._due and not self._is_open(self._due[0][2]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    # ---- inside ---------------------------------------------------------------------------------

    def _is_open(self, handout: Handout) -> bool:
        return self.open.get((handout.link, handout.ask.id)) is handout

    def _begin(self, link: str, ask: Ask) -> None:
        reason = self._computes.problem(ask)
        if self.is_draining:
            reason = "this engine is to stop: ask another"
        if not reason and len(self.open) >= _MAX_HANDOUTS:
            reason = "too many hand-overs are open here"
        if not reason and ask.compute and not self._computing:
            reason = "this engine computes nothing for others: ask a prefill server"
        if reason:
            self._refuse(link, ask.id, reason)
            return
        name = f"{link}/{ask.id}"
        if ask.compute:
            lease, found, last = None, Found(), ask.last
        else:
            lease, found = self._what_is_there(name, ask)
            last = max(ask.first, lease.tail.end)
        export = self._manager.exports.open(ask.first, last)
        now = self._clock()
        need = self._budget.need(ask.first, last)
        handout = Handout(
            link, ask, name, export, lease, found, need, ask.first, now, now, said_s=now
        )
        handout.place = self._come_pages
        self._come_pages += need[0]
        self.open[link, ask.id] = handout
        self._queued[handout] = None
        self._look_at(handout, now + ask.timeout_s / 4)

    def _what_is_there(self, name: str, ask: Ask) -> tuple[Lease, Found]:
        key = self._computes.key(ask)
        match = self._manager.match(key)
        lease = self._manager.acquire(match, RequestId(name), priority=ask.priority)
        return lease, Found(lease.num_device, lease.num_host)

    def _repair(self, handout: Handout, first: int, last: int) -> None:
        """It lacks pages that it had, or was offered."""
        if handout.completed:  # it was not to be looked at for long
            self._look_at(handout, handout.heard_s + handout.ask.timeout_s / 4)
        handout.completed = False
        self._on_device.pop(handout, None)
        if handout.begun:
            self._active[handout] = None
        self._manager.exports.repair(handout.export, first, last)

    def _skip(self, handout: Handout, first: int) -> None:
        """It has found pages before `first` elsewhere: the room for those that were not granted yet
        is others'."""
        if handout.repair or not 0 <= first < handout.export.last:
            return
        skipped = self._manager.exports.skip(handout.export, first)
        handout.need = (handout.need[0] - skipped, *handout.need[1:])
        if handout.begun and skipped:
            keys = self._key(handout).page_keys(first - skipped, first)
            self._budget.give_some_back(self._claim(handout), set(split_keys(keys)))
        elif not handout.begun:
            self._gone_pages += skipped
            handout.first = max(handout.first, first)
            handout.claim = None

    def _may_begin(self, handout: Handout) -> bool:
        is_full = handout.ask.compute and self._computes.is_full()
        return not is_full and self._budget.has(self._claim(handout))

    def _claim(self, handout: Handout) -> PageClaim:
        """What it takes. Those that wait behind others have none: there may be thousands."""
        if handout.claim is None:
            key, first = self._key(handout), handout.first
            handout.claim = claim_of(handout.need, key, first, first + handout.need[0])
        return handout.claim

    def _key(self, handout: Handout) -> PrefixKey:
        return self._computes.key(handout.ask) if handout.lease is None else handout.lease.key

    def _leave_queue(self, handout: Handout) -> None:
        del self._queued[handout]
        self._gone_pages += handout.need[0]

    def _start(self, handout: Handout) -> None:
        """It has the room that it needs; what is not begun takes none."""
        handout.begun = True
        self._leave_queue(handout)
        self._active[handout] = None
        self._budget.take(self._claim(handout))
        if handout.ask.compute:
            reason = self._computes.begin(handout.name, handout.ask)
            if reason:
                self._give_up(handout, reason)

    def _advance(self, handout: Handout) -> None:
        ask, export = handout.ask, handout.export
        lease = handout.lease
        if lease is None:
            failure = self._computes.failure(handout.name)
            if failure:
                self._give_up(handout, failure)
                return
            lease = self._computes.lease(handout.name)
            if lease is None:
                return
        for grant in self._manager.exports.grant(export, lease):
            handout.offers += 1
            handout.said_s = self._moved_s = self._clock()
            offer = Offer(
                ask.id,
                grant.component,
                grant.op,
                0,
                grant.first,
                grant.count,
                export.last,
                self._ticket(grant.op),
            )
            self._outgoing.append((handout, offer))
        # What is there and is not computed is all there will be, even if it ends before `first`.
        is_whole = handout.lease is not None or lease.tail.end >= export.last
        if export.complete and is_whole:
            found = (
                handout.found if handout.lease is not None else self._computes.found(handout.name)
            )
            complete = Complete(ask.id, export.last, handout.offers, found, handout.repair)
            handout.completed = True
            handout.heard_s = self._clock()
            del self._active[handout]
            self._on_device[handout] = None
            self._outgoing.append((handout, complete))

    def _let_go_of_device(self, handout: Handout) -> None:
        """What a peer reads it reads from the host: others may have the device, once nothing is
        computed there any more."""
        lease = handout.lease or self._computes.lease(handout.name)
        if handout.lease is None and not self._computes.is_kept(handout.name):
            return
        del self._on_device[handout]
        if lease is not None and not lease.yielded and self._manager.exports.is_on_host(lease):
            self._manager.yield_device(lease)

    # ---- time ------------------------------------------------------------------------------------

    def _look_at(self, handout: Handout, due_s: float) -> None:
        heapq.heappush(self._due, (due_s, next(self._numbers), handout))

    def _look(self, handout: Handout, now: float) -> None:
        """Its time has come, though nothing was heard of it."""
        timeout_s = handout.ask.timeout_s
        if not handout.completed:
            self._reassure(handout, now)
            self._look_at(handout, now + timeout_s / 4)
        elif now - handout.heard_s > 2 * timeout_s:
            self._give_up(handout, "it was held for too long")
        else:
            self._look_at(handout, max(handout.heard_s + 2 * timeout_s, now + timeout_s / 4))

    def _reassure(self, handout: Handout, now: float) -> None:
        """A receiver that hears nothing for too long asks elsewhere. One whose prompt is queued or
        being computed is told so, and for how long; and one whose pages find no room on the host as
        long as any is given back there: then it may have better luck elsewhere."""
        timeout_s = handout.ask.timeout_s
        if now - handout.said_s < timeout_s / 4:
            return
        computes = handout.begun and handout.ask.compute
        is_waiting = not handout.begun or (computes and self._computes.is_waiting(handout.name))
        if is_waiting or now - self._moved_s < timeout_s:
            handout.said_s = now
            wait_s = None if handout.begun else self._estimate_s(handout)
            self._outgoing.append((handout, Wait(handout.ask.id, wait_s)))

    def _estimate_s(self, handout: Handout) -> float | None:
        """How long it will be queued, by the pages before it and how fast others went."""
        ahead = max(0, handout.place - self._gone_pages)
        return ahead * self._pace_s if self._pace_s else None

    def _note_pace(self, num_pages: int) -> None:
        """The room of so many pages was given back."""
        now = self._clock()
        passed_s, self._freed_s = now - self._freed_s, now
        if self._queued and num_pages:  # else nobody waited for it
            pace_s = passed_s / num_pages
            old_s = self._pace_s or pace_s
            self._pace_s = old_s + _PACE_SHARE * (pace_s - old_s)

    # ---- ends ------------------------------------------------------------------------------------

    def _give_up(self, handout: Handout, reason: str) -> None:
        self._refuse(handout.link, handout.ask.id, reason)
        self._end(handout)

    def _refuse(self, link: str, name: str, reason: str) -> None:
        self._remember_over(link, name)
        self._send(link, Refused(name, reason))

    def _remember_over(self, link: str, name: str) -> None:
        self._over[link, name] = None
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]

    def _end(self, handout: Handout) -> None:
        del self.open[handout.link, handout.ask.id]
        self._active.pop(handout, None)
        self._on_device.pop(handout, None)
        if handout.begun:
            self._note_pace(handout.need[0])
            self._budget.give_back(self._claim(handout))
        else:
            self._leave_queue(handout)
        self._moved_s = self._clock()
        self._remember_over(handout.link, handout.ask.id)
        self._manager.exports.close(handout.export)
        if handout.lease is not None:
            self._manager.release(handout.lease)
        else:
            self._computes.end(handout.name)
        self._on_end(handout)
