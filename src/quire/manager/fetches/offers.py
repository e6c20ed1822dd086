"""Offers: what peers have for a lease, as they offer it, in any order and in pieces.

What the host has no room for waits, and is tried again at every step: the peer keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from quire.manager.core import Core
from quire.manager.fetches.base import Intake, OfferedPages
from quire.manager.fetches.intakes import Intakes
from quire.manager.fetches.line import Line, Turn
from quire.manager.lease import Lease
from quire.messages import PeerSource
from quire.tree import slot_of
from quire.types import HOST


class Offers:
    def __init__(
        self, core: Core, intakes: Intakes, line: Line, advance: Callable[[Lease], None]
    ) -> None:
        self._core = core
        self._intakes = intakes
        self._line = line
        self._advance = advance

    def open(self, lease: Lease, last: int, timeout_s: float) -> Intake:
        """Prepare for pages of the lease's prefix, up to page `last`, that a peer will offer."""
        lease.require_live()
        known = [bytearray(last) for _ in self._core.components]
        intake = Intake(lease.key, lease.tail.end, last, timeout_s, known, lease=lease)
        if lease.intake is not None:
            self._intakes.take_over(lease.intake, intake)
        self.close(lease)
        lease.intake = intake
        return intake

    def look_again(self, intake: Intake) -> None:
        """What lies in front of what has come may be there by now, whoever brought it."""
        if not intake.stopped:
            self._intakes.fresh[intake] = None

    def pause(self, lease: Lease) -> None:
        """No more is wanted from this peer; what has come, usable by itself or not, is kept for
        the next `open`, or until `close`."""
        if lease.intake is not None and not lease.intake.stopped:
            self._intakes.stop(lease.intake)

    def close(self, lease: Lease) -> None:
        """No more is wanted from any peer; what has come and fits stays."""
        if lease.intake is not None:
            self._intakes.close(lease.intake)
            lease.intake = None

    def take(
        self, intake: Intake, component: str, first: int, count: int, source: PeerSource
    ) -> None:
        """Pages [first, first + count) can be had at `source`. What is there, or on its way, is
        not fetched again."""
        index = next((c.index for c in self._core.components if c.name == component), None)
        if intake.stopped or index is None:
            return
        start, end = self._core.components[index].span(0, intake.last)
        known, at, stop = intake.known[index], max(first, start), min(first + count, end)
        in_line = bool(intake.offers)
        while at < stop and (at := known.find(0, at, stop)) >= 0:
            until = known.find(1, at, stop)
            until = stop if until < 0 else until
            known[at:until] = b"\1" * (until - at)
            intake.offers.append(OfferedPages(index, at, until, source, first))
            at = until
        if intake.offers and not in_line:
            self._line.join(intake.key, partial(self._serve, intake))

    def _serve(self, intake: Intake) -> Turn:
        """Its turn: fetch as much of what was offered as budget and host have room for."""
        core, lease = self._core, intake.lease
        assert lease is not None
        if intake.stopped:
            return Turn.SERVED
        if not core.healthy:
            return Turn.PASSES
        if intake.shares and not lease.private_pages:  # else it may use what it found, no more
            self._advance(lease)
        intake.shares = False
        while intake.offers:
            offer = intake.offers[0]
            count = offer.last - offer.first
            if offer.component == 0:
                if offer.first < lease.tail.end:
                    self._shorten(intake, min(count, lease.tail.end - offer.first))
                    continue
                if self._is_coming_for_another(intake, offer.first):
                    intake.shares = True
                    return Turn.PASSES
                allowed = self._line.allowance(intake.key, offer.first, intake.num_coming)
                if allowed <= 0:
                    return Turn.WAITS if self._line.is_spent else Turn.PASSES
                count = min(count, allowed)
            count = min(count, core.room(slot_of(offer.component, HOST)))
            if not count:
                core.counters.intake_waits += 1
                return Turn.PASSES
            span = (offer.component, offer.first, offer.first + count)
            index = offer.source.first + offer.first - offer.origin
            self._intakes.send(intake, [span], msgspec.structs.replace(offer.source, first=index))
            self._shorten(intake, count)
        return Turn.SERVED

    def _is_coming_for_another(self, intake: Intake, page: int) -> bool:
        """If so, it is not read twice: it is in the tree soon, or else is read then."""
        lease, key = intake.lease, intake.key
        assert lease is not None
        if lease.tail.end:
            key.anchor(lease.tail.end, self._core.tree.last_key_of(lease.tail))
        return self._intakes.bringing(key.page_keys(page, page + 1)) not in (None, intake)

    def _shorten(self, intake: Intake, count: int) -> None:
        """The first pages of its first offer are taken care of."""
        offer = intake.offers[0]
        offer.first += count
        if offer.first >= offer.last:
            intake.offers.popleft()
