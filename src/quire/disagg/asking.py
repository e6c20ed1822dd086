"""Asking: one peer after the other for what a hand-over lacks, and again for what failed.

    no try ──ask, ask_ahead──▶ Try ──repair, a few times──▶ Try ──give_up──▶ no try, after a pause
       └──nobody is left──▶ the transfer has FAILED; the request computes the rest

Knows peers, tries and pauses; not when a hand-over may begin, nor when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from quire.disagg.config import ReceiverConfig, ReceiverCounters
from quire.disagg.contacts import Contacts, ContactState
from quire.disagg.handover import DueRepair, Half, Handover, Stage, Try
from quire.disagg.host_budget import HostBudget
from quire.manager import CacheManager
from quire.messages import PeerSource
from quire.peer.messages import Abort, Ask, Done, Offer, Repair, Skip
from quire.types import PageStatus

_MAX_REPAIRS = 4
"""Of one asking; after that another peer is asked, or the same one anew."""
_TOKEN_BYTES = 4


class Asking:
    def __init__(
        self,
        manager: CacheManager,
        contacts: Contacts,
        budget: HostBudget,
        counters: ReceiverCounters,
        *,
        name: str,
        clock: Callable[[], float],
        config: ReceiverConfig,
        rng: Random,
    ) -> None:
        """As Receiver has them."""
        self._manager = manager
        self._contacts = contacts
        self._links = contacts.links
        self._budget = budget
        self._counters = counters
        self._name = name
        self._clock = clock
        self._config = config
        self._rng = rng
        self._num_asked = 0
        self.by_id: dict[str, Handover] = {}
        """Those that a peer was asked for, by the name it knows them by."""

    def ask_ahead(self, handover: Handover, now: float) -> None:
        """While the own store is still asked: the first peer that is there, so that it begins to
        compute. If that comes to nothing, others have their turn when the store has answered."""
        if handover.tries or handover.current is not None:
            return
        for number, link in enumerate(handover.sources[: self._max_tries(handover)]):
            if self._contacts.standing(link) is ContactState.UP:
                handover.tries = number
                self.ask(handover, now)
                return

    def know(self, handover: Handover) -> None:
        """The own tiers are known: of a peer that was asked ahead only the rest is wanted."""
        current = handover.current
        if current is None:
            return
        promised = handover.promised
        if promised > current.first:
            current.first = promised
            self._links.send(current.link, Skip(current.id, promised))
        current.reached = current.first
        held, current.held = current.held, []
        for offer in held:
            self.offered(handover, current, offer)

    def withdraw(self, handover: Handover) -> None:
        """A peer was asked ahead, and nothing is wanted of it."""
        if handover.current is not None:
            self.drop(handover)
            handover.tries -= 1

    def ask(self, handover: Handover, now: float) -> None:
        """Ask the peer whose turn it is, if it can be reached."""
        sources, contacts = handover.sources, self._contacts
        if handover.tries >= self._max_tries(handover):
            self._fail(handover)
            return
        if now < handover.pause_until_s:
            return
        link = sources[handover.tries % len(sources)]
        standing = contacts.standing(link)
        if standing is not ContactState.UP:
            why = f"{link}: {contacts.reason(link)}"
            others = {contacts.standing(source) for source in sources}
            if others == {ContactState.GONE}:
                handover.why = why
                self._fail(handover)
            elif ContactState.UP in others or standing is ContactState.GONE:
                self._next(handover, why)
            return
        lease, is_restored = handover.lease, handover.restore is not Half.PENDING
        if is_restored and not self._budget.fits(handover.need):
            self.forgo_found(handover)
        first = lease.tail.end if is_restored else handover.promised
        intake = self._manager.offers.open(lease, handover.wanted, self._config.timeout_s)
        self._num_asked += 1
        name = f"{self._name}-{self._num_asked}"
        overlap = lease.key.namespace.unit.overlap
        end = (handover.wanted * self._manager.config.page_size + overlap) * _TOKEN_BYTES
        prompt = handover.prompt
        ask = Ask(
            id=name,
            tokens=prompt.tokens[:end],
            salt=prompt.salt,
            first=first,
            last=handover.wanted,
            compute=handover.compute,
            timeout_s=self._config.timeout_s,
            priority=prompt.priority,
            trace=prompt.trace,
        )
        if not self._links.send(link, ask):
            self._manager.offers.pause(lease)
            self._next(handover, f"{link}: takes no messages")
            return
        handover.tries += 1
        handover.peer, handover.asked = link, name
        handover.current = Try(name, link, first, intake, now, reached=first)
        handover.progress_s = now
        self.by_id[name] = handover

    def _max_tries(self, handover: Handover) -> int:
        rounds = self._config.rounds if handover.compute else 1
        return min(len(handover.sources) * rounds, self._config.max_tries)

    def offered(self, handover: Handover, current: Try, offer: Offer) -> None:
        hello = self._contacts.hello(current.link)
        if hello is None or offer.grant in current.grants:
            return
        current.grants.add(offer.grant)
        if not handover.compute:  # it ends where the peer's does
            current.intake.last = min(handover.wanted, offer.last)
        is_full = offer.component == self._manager.components[0].name
        skip = max(0, current.first - offer.first) if is_full else 0
        if skip < offer.count:
            first, count, start = offer.first + skip, offer.count - skip, offer.start + skip
            source = PeerSource(hello.epoch, offer.grant, start, hello.parts, offer.ticket)
            self._manager.offers.take(current.intake, offer.component, first, count, source)

    # ---- when something goes wrong --------------------------------------------------------------

    def repair_failed(self, handover: Handover, current: Try) -> None:
        failed, current.intake.failed = current.intake.failed, []
        pages = [page for page, _ in failed]
        reason = PageStatus(max(status for _, status in failed)).name.lower()
        self.count_repair(handover, reason, len(failed))
        self.repair(handover, current, min(pages), max(pages) + 1, reason)

    def repair_lost(self, handover: Handover, current: Try) -> None:
        """It has let go of device pages that the host does not have."""
        first, last = handover.lease.tail.end, current.reached
        current.reached = first
        full, *others = current.intake.known
        full[first:last] = bytes(last - first)
        for known in others if last == handover.wanted else ():  # of use at the end only
            known[:] = bytes(len(known))
        self.count_repair(handover, "lost", last - first)
        self.repair(handover, current, first, last, "lost")

    def repair(self, handover: Handover, current: Try, first: int, last: int, reason: str) -> None:
        """Soon: what failed may fail again at once, and others may want the same."""
        current.first = min(current.first, first)
        due = current.repair
        if due is not None:
            due.first, due.last = min(due.first, first), max(due.last, last)
            return
        if current.repairs >= _MAX_REPAIRS:
            self.give_up(handover, "repairs", f"{current.link}: pages fail again and again")
            return
        now = self._clock()
        pause_s = self._pause_s(current.repairs) if current.repairs else 0.0
        current.repairs += 1
        current.repair = DueRepair(now + pause_s, first, last, reason)
        if not pause_s:
            self.send_repair(handover, current, current.repair)

    def send_repair(self, handover: Handover, current: Try, due: DueRepair) -> None:
        current.repair = None
        handover.progress_s = self._clock()  # it has its time again
        repair = Repair(current.id, current.repairs, due.first, due.last, due.reason)
        if not self._links.send(current.link, repair):
            self.give_up(handover, "link", f"{current.link}: takes no messages")

    def _pause_s(self, times: int) -> float:
        """Before something is tried again that failed so often."""
        config = self._config
        longest = min(config.first_pause_s * 2.0 ** min(times, 16), config.last_pause_s)
        return longest * self._rng.uniform(0.5, 1.0)

    def forgo_found(self, handover: Handover) -> None:
        """The host has no room for what was found beside what is to come: then all is to come."""
        if handover.compute and handover.restore is not Half.PENDING:
            self._manager.offers.close(handover.lease)
            self._manager.yield_device(handover.lease, host=True)
            handover.restored = handover.landed = 0

    def count_repair(self, handover: Handover, reason: str, count: int) -> None:
        handover.repaired[reason] = handover.repaired.get(reason, 0) + count
        self._counters.repairs[reason] += count

    def give_up(self, handover: Handover, reason: str, why: str) -> None:
        """This asking has failed: what has come of it stays, the next peer is asked for more."""
        handover.why = why
        self.count_repair(handover, reason, max(0, handover.wanted - handover.lease.tail.end))
        self.drop(handover, for_good=False)
        now = handover.progress_s = self._clock()
        if handover.tries >= len(handover.sources):  # all were asked before
            handover.pause_until_s = now + self._pause_s(handover.tries - len(handover.sources))

    def _next(self, handover: Handover, why: str) -> None:
        """The peer whose turn it is cannot be asked."""
        handover.why = why
        handover.tries += 1
        handover.progress_s = self._clock()

    def drop(self, handover: Handover, *, for_good: bool = True) -> None:
        """Let go of the peer; and, `for_good`, of what has come and is not usable by itself."""
        current, handover.current = handover.current, None
        if current is not None:
            del self.by_id[current.id]
            ended = handover.stage is Stage.READY
            self._links.send(current.link, Done(current.id) if ended else Abort(current.id))
        if not handover.lease.released:
            offers = self._manager.offers
            (offers.close if for_good else offers.pause)(handover.lease)

    def _fail(self, handover: Handover) -> None:
        """There is nobody to ask: the request goes on with what it has."""
        handover.transfer = Half.FAILED if handover.compute else Half.READY
        handover.least = 0
        if handover.compute:
            handover.why = handover.why or "there is no prefill server to ask"
            self._counters.local["no_peer"] += 1
