"""Holder: gives peers the pages they ask for, computing them first if need be. The prefill side.

Knows the cache's manager and messages; neither sockets nor the scheduler, which it reaches through
`Computes`. What was offered stays until the asker says Done or Abort, is gone, or has said nothing
for too long. Every message may come twice, late, or before an earlier one: each names its
hand-over, and what is over is not begun again, nor what was given up before it was heard of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.disagg.budget import HostBudget, Pages
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
    Wait,
)
from quire.types import RequestId

_MAX_HOLDINGS = 4096
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

    def failure(self, name: str) -> str:
        """Why it will never be computed; empty: it may."""

    def end(self, name: str) -> None:
        """It is not needed any more; any state, any time."""


@dataclass(slots=True, eq=False)
class Holding:
    link: str
    ask: Ask
    name: str
    export: Export
    lease: Lease | None
    """Of its own, if nothing is computed for it."""
    found: Found
    need: Pages
    """On the host."""
    heard_s: float
    offers: int = 0
    repair: int = 0
    """Number of the last repair asked for."""
    completed: bool = False
    """Everything asked for so far was offered."""
    begun: bool = False
    """It has them, and is computed if it is to be; those that wait have nothing."""
    said_s: float = 0.0
    """When the asker last heard of it."""


class Holder:
    def __init__(
        self,
        manager: CacheManager,
        computes: Computes,
        *,
        clock: Callable[[], float],
        send: Callable[[str, PeerMessage], bool],
        computing: bool = True,
    ) -> None:
        """`computing` = False: only what is there is given."""
        self._manager = manager
        self._computes = computes
        self._clock = clock
        self._send = send
        self._computing = computing
        self.open: dict[tuple[str, str], Holding] = {}
        self._over: dict[tuple[str, str], None] = {}
        self._outgoing: list[tuple[Holding, PeerMessage]] = []
        self._budget = HostBudget(manager)
        """What those that have begun need."""
        self._moved_s = 0.0
        """When anything was last granted, or given back."""
        self.served = 0
        """Hand-overs that ended with Done."""

    def received(self, link: str, message: Ask | Repair | Wait | Done | Abort) -> None:
        name = (link, message.id)
        holding = self.open.get(name)
        if holding is not None:
            holding.heard_s = self._clock()
        match message:
            case Ask():
                if holding is None and name not in self._over:
                    self._begin(link, message)
            case Repair(_, number, first, last):
                if holding is None:
                    self._refuse(link, message.id, "there is no such hand-over (any more)")
                elif number > holding.repair and 0 <= first < last <= holding.export.last:
                    holding.repair = number
                    holding.completed = False
                    self._manager.exports.repair(holding.export, first, last)
            case Wait():
                pass
            case Done() | Abort():
                if holding is None:
                    self._remember_over(link, message.id)
                else:
                    self.served += isinstance(message, Done)
                    self._end(holding)

    def disconnected(self, link: str) -> None:
        for holding in [h for h in self.open.values() if h.link == link]:
            self._end(holding)

    def advance(self) -> None:
        """Once per step: grant what has become readable. What is to be said about it is kept until
        `flush`: first the workers must know."""
        now = self._clock()
        is_short = False
        for holding in list(self.open.values()):
            if holding.completed and now - holding.heard_s > 2 * holding.ask.timeout_s:
                self._give_up(holding, "it was held for too long")
            elif not holding.completed:
                if not holding.begun:
                    # In the order of their coming: a small one that overtakes may do so for ever.
                    is_short = is_short or not self._may_begin(holding)
                    if not is_short:
                        self._start(holding)
                if holding.begun and self._is_open(holding):
                    self._advance(holding)
                self._reassure(holding, now)

    def flush(self) -> None:
        """Say what there is to say; the workers have been told."""
        outgoing, self._outgoing = self._outgoing, []
        for holding, message in outgoing:
            if self._is_open(holding) and not self._send(holding.link, message):
                self._end(holding)  # it will not be missed: the link is gone, or as good as

    def next_deadline(self) -> float | None:
        times = [h.heard_s + 2 * h.ask.timeout_s for h in self.open.values() if h.completed]
        return min(times, default=None)

    # ---- inside ---------------------------------------------------------------------------------

    def _is_open(self, holding: Holding) -> bool:
        return (holding.link, holding.ask.id) in self.open

    def _begin(self, link: str, ask: Ask) -> None:
        reason = self._computes.problem(ask)
        if not reason and len(self.open) >= _MAX_HOLDINGS:
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
        holding = Holding(link, ask, name, export, lease, found, need, now, said_s=now)
        self.open[link, ask.id] = holding

    def _what_is_there(self, name: str, ask: Ask) -> tuple[Lease, Found]:
        key = self._computes.key(ask)
        match = self._manager.match(key)
        lease = self._manager.acquire(match, RequestId(name), priority=ask.priority)
        return lease, Found(lease.num_device, lease.num_host)

    def _may_begin(self, holding: Holding) -> bool:
        is_full = holding.ask.compute and self._computes.is_full()
        return not is_full and self._budget.has(holding.need)

    def _start(self, holding: Holding) -> None:
        """It has the room that it needs; what is not begun takes none."""
        holding.begun = True
        self._budget.take(holding.need)
        if holding.ask.compute:
            reason = self._computes.begin(holding.name, holding.ask)
            if reason:
                self._give_up(holding, reason)

    def _advance(self, holding: Holding) -> None:
        ask, export = holding.ask, holding.export
        lease = holding.lease
        if lease is None:
            failure = self._computes.failure(holding.name)
            if failure:
                self._give_up(holding, failure)
                return
            lease = self._computes.lease(holding.name)
            if lease is None:
                return
        for grant in self._manager.exports.grant(export, lease):
            holding.offers += 1
            holding.said_s = self._moved_s = self._clock()
            offer = Offer(
                ask.id, grant.component, grant.op, 0, grant.first, grant.count, export.last
            )
            self._outgoing.append((holding, offer))
        # What is there and is not computed is all there will be, even if it ends before `first`.
        is_whole = holding.lease is not None or lease.tail.end >= export.last
        if export.complete and is_whole:
            found = (
                holding.found if holding.lease is not None else self._computes.found(holding.name)
            )
            complete = Complete(ask.id, export.last, holding.offers, found, holding.repair)
            holding.completed = True
            holding.heard_s = self._clock()
            self._outgoing.append((holding, complete))

    def _reassure(self, holding: Holding, now: float) -> None:
        """An asker that hears nothing for too long asks elsewhere. One whose prompt is queued or
        being computed is told so, and one whose pages find no room on the host as long as any is
        given back there; then it may have better luck elsewhere."""
        timeout_s = holding.ask.timeout_s
        if now - holding.said_s < timeout_s / 4:
            return
        computes = holding.begun and holding.ask.compute
        is_waiting = not holding.begun or (computes and self._computes.is_waiting(holding.name))
        if is_waiting or now - self._moved_s < timeout_s:
            holding.said_s = now
            self._outgoing.append((holding, Wait(holding.ask.id)))

    def _give_up(self, holding: Holding, reason: str) -> None:
        self._refuse(holding.link, holding.ask.id, reason)
        self._end(holding)

    def _refuse(self, link: str, name: str, reason: str) -> None:
        self._remember_over(link, name)
        self._send(link, Refused(name, reason))

    def _remember_over(self, link: str, name: str) -> None:
        self._over[link, name] = None
        while len(self._over) > _REMEMBERED:
            del self._over[next(iter(self._over))]

    def _end(self, holding: Holding) -> None:
        del self.open[holding.link, holding.ask.id]
        if holding.begun:
            self._budget.give_back(holding.need)
        self._moved_s = self._clock()
        self._remember_over(holding.link, holding.ask.id)
        self._manager.exports.close(holding.export)
        if holding.lease is not None:
            self._manager.release(holding.lease)
        else:
            self._computes.end(holding.name)
