"""Receiver: gets the pages that a request lacks from peers. The decode side of a hand-over.

Knows the cache's manager and messages; neither sockets nor the scheduler. Nothing here waits: the
hand-overs that move are looked at once per step, and each has its own deadline, so that none holds
back another. Those that wait for room are not looked at: a step costs the same however many do.

Whatever goes wrong, the answer is the same: ask for what is still missing, of this peer or of the
next (asking.py); and when there is nobody left, the request computes the rest itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from random import Random

from quire.disagg.asking import Asking
from quire.disagg.config import ReceiverConfig, ReceiverCounters
from quire.disagg.contacts import Contacts, Links
from quire.disagg.handover import AskedPrompt, DecodePrefixMatch, Half, Handover, Stage, Try
from quire.disagg.host_budget import HostBudget, PageClaim, claim_of
from quire.manager import CacheManager, Lease, LoadState, PrefetchState
from quire.peer.hub import Hello
from quire.peer.messages import (
    Complete,
    Offer,
    Refused,
    ToReceiver,
    Wait,
)


class Receiver:
    def __init__(
        self,
        manager: CacheManager,
        links: Links,
        *,
        name: str,
        clock: Callable[[], float],
        config: ReceiverConfig | None = None,
        room: Callable[[], int] | None = None,
        rng: Random | None = None,
        on_end: Callable[[Handover], None] | None = None,
    ) -> None:
        """`name`: unique among all engines that ask, in all their lives. `room`: device pages that
        requests could still be given. `rng`: for pauses, so that those that failed together do not
        try again together. `on_end`: told of every hand-over that ends, however."""
        self._manager = manager
        self._clock = clock
        self._config = config or ReceiverConfig()
        self.contacts = Contacts(links, clock, self._config.patience)
        self._links = links
        self._room = room
        self._on_end = on_end or (lambda _handover: None)
        self.open: dict[Handover, None] = {}
        self._queued: OrderedDict[Handover, None] = OrderedDict()
        """Those that wait for room, in the order of their coming."""
        self._come: list[Handover] = []
        """Those of them that have come since the last step."""
        self._active: dict[Handover, None] = {}
        """LOOKING or MOVING."""
        self._budget = HostBudget(manager)
        """What those that are not queued need."""
        self._moved_s = 0.0
        """When a page last came, for whomever, or room was given back."""
        self.counters = ReceiverCounters()
        self._asking = Asking(
            manager,
            self.contacts,
            self._budget,
            self.counters,
            name=name,
            clock=clock,
            config=self._config,
            rng=rng or Random(name),
        )

    # ---- for the scheduler ----------------------------------------------------------------------

    def begin(
        self,
        owner: str,
        lease: Lease,
        prompt: AskedPrompt,
        sources: list[str],
        *,
        compute: bool = True,
        restore: bool = True,
        is_counted: bool = False,
    ) -> Handover:
        """Start getting what the lease's prefix lacks; with `restore` from the own store first.
        `is_counted`: it has looked before, and was counted then."""
        now = self._clock()
        handover = Handover(
            owner,
            lease,
            prompt,
            lease.key.last,
            self._budget.most(lease.key.last),
            list(sources),
            now,
            compute,
            restore,
            is_counted,
            progress_s=now,
        )
        self.open[handover] = self._queued[handover] = None
        self._come.append(handover)
        self.contacts.name(sources)
        return handover

    def cancel(self, handover: Handover) -> None:
        """The request goes on with what is there, has ended, or lets go of its lease; any state,
        any time."""
        if handover in self.open:
            self._asking.drop(handover)
            self._end(handover)

    def advance(self) -> None:
        """Once per step: one look at every hand-over that moves."""
        now = self._clock()
        for handover in self._active:
            self._note_progress(handover, now)
        self._let_in()
        for handover in list(self._active):
            if handover.stage is Stage.LOOKING:
                self._look(handover, now)
            if handover.stage is Stage.MOVING:
                self._follow(handover, now)
        self.contacts.tidy(lambda: {source for h in self.open for source in h.sources})

    def next_deadline(self) -> float | None:
        """When somebody will have been waited for long enough."""
        return min((self._due_s(h) for h in self._active), default=None)

    @property
    def num_asked(self) -> int:
        """Askings that a peer may still answer."""
        return len(self._asking.by_id)

    @property
    def num_waiting(self) -> int:
        """Those that are not READY."""
        return len(self._queued) + len(self._active)

    # ---- for the line ---------------------------------------------------------------------------

    def connected(self, link: str, hello: Hello, transport: str = "tcp") -> None:
        self.contacts.connected(link, hello, transport)

    def disconnected(self, link: str, reason: str) -> None:
        self.contacts.disconnected(link, reason)
        for handover in list(self.open):
            if handover.current is not None and handover.current.link == link:
                self._asking.give_up(handover, "link", f"{link}: {reason}")

    def received(self, link: str, message: ToReceiver) -> None:
        handover = self._asking.by_id.get(message.id)
        current = handover.current if handover is not None else None
        if handover is None or current is None or current.link != link:
            return  # of one that is over
        handover.progress_s = self._clock()
        match message:
            case Offer() if handover.stage is Stage.LOOKING:
                current.held.append(message)
            case Offer():
                self._asking.offered(handover, current, message)
            case Complete():
                latest = current.complete
                if latest is None or message.repair >= latest.repair:
                    current.complete = message
                    handover.found = message.found
            case Wait(_, wait_s):
                current.estimate_s = wait_s
            case Refused(_, reason):
                self._asking.give_up(handover, "refused", f"{link}: {reason}")

    # ---- looking --------------------------------------------------------------------------------

    def _let_in(self) -> None:
        """In the order of their coming: a small one that overtakes may do so for ever. Who waits
        for room takes none: those who move may need what it found."""
        while self._queued and self._has_room(first := next(iter(self._queued))):
            del self._queued[first]
            self._active[first] = None
            self._begin_looking(first)
        come, self._come = self._come, []
        for handover in come:
            if handover in self._queued and not handover.lease.yielded:
                self._manager.yield_device(handover.lease, host=True)

    def _begin_looking(self, handover: Handover) -> None:
        handover.stage = Stage.LOOKING
        self._budget.take(self._claim(handover))
        if handover.from_store or handover.lease.yielded:  # else it may use what it found, no more
            self._manager.admit(handover.lease)
        if handover.from_store:
            self._manager.prefetch(handover.lease)

    def _look(self, handover: Handover, now: float) -> None:
        """What do the own tiers have? Known once the store has answered, or was waited for."""
        manager, lease = self._manager, handover.lease
        prefetch = lease.prefetch
        settled = prefetch is None or prefetch.state is PrefetchState.DONE
        if not settled and (prefetch is None or prefetch.state is not PrefetchState.FETCHING):
            if not manager.ready(lease):
                self._have_begun(handover, now)
                return
            settled = True
        device = lease.num_device
        store = 0
        if settled and prefetch is not None:
            before = lease.tail.end
            manager.admit(lease)
            store = lease.tail.end - before
        elif prefetch is not None:
            store = max(0, prefetch.first + prefetch.num_fetching - lease.tail.end)
        host = lease.tail.end - device - (store if settled else 0)
        handover.match = DecodePrefixMatch(device, host, store, handover.wanted)
        self._move(handover, now)

    def _have_begun(self, handover: Handover, now: float) -> None:
        """A prefill server computes while the store is asked."""
        missing = handover.wanted - handover.lease.tail.end
        if handover.compute and missing > self._config.local_pages:
            self._asking.ask_ahead(handover, now)
        if handover.current is not None:
            self._check_time(handover, handover.current, now)

    def _has_room(self, handover: Handover) -> bool:
        """Is there room for all of it, beside all that moves already? One alone always may."""
        budget, claim = self._budget, self._claim(handover)
        taken = budget.taken[0]
        on_device = not taken or self._room is None or taken + budget.more(claim)[0] <= self._room()
        return on_device and budget.has(claim)

    def _claim(self, handover: Handover) -> PageClaim:
        """What it takes. Those that wait behind others have none: there may be thousands."""
        if handover.claim is None:
            key = handover.lease.key
            handover.claim = claim_of(handover.need, key, 0, handover.wanted)
        return handover.claim

    # ---- moving ---------------------------------------------------------------------------------

    def _move(self, handover: Handover, now: float) -> None:
        handover.stage = Stage.MOVING
        handover.moving_s = handover.progress_s = now
        missing = handover.wanted - handover.promised
        few = self._manager.config.threshold_pages - 1
        if handover.compute:
            few = self._config.local_pages
        if missing <= few:
            handover.transfer = Half.READY
            if missing and handover.compute:
                handover.least = 0
                self.counters.local["short"] += 1
            self._asking.withdraw(handover)
        else:
            self._asking.know(handover)

    def _follow(self, handover: Handover, now: float) -> None:
        if handover.restore is Half.PENDING:
            self._follow_restore(handover, now)
        current = handover.current
        if current is not None and current.repair is not None and now >= current.repair.at_s:
            self._asking.send_repair(handover, current, current.repair)
        elif handover.transfer is Half.PENDING:
            self._follow_transfer(handover, now)
        if handover.stage is not Stage.MOVING:
            return
        if handover.restore is not Half.PENDING and handover.transfer is not Half.PENDING:
            if handover.lease.tail.end >= handover.least:
                self._arrived(handover)
            elif handover.current is None:  # all was to be there, and is not
                handover.transfer = Half.PENDING

    def _follow_restore(self, handover: Handover, now: float) -> None:
        manager, lease = self._manager, handover.lease
        if not manager.ready(lease):
            return
        if lease.prefetch is not None:
            manager.admit(lease)
        promised = handover.promised
        handover.restored = min(lease.tail.end, promised)
        handover.landed = lease.prefetch.num_landed if lease.prefetch is not None else 0
        if not handover.is_counted:
            handover.is_counted = True
            self.counters.promised_pages += promised
            self.counters.restored_pages += handover.restored
        short = handover.restored < promised
        handover.restore = Half.FAILED if short else Half.READY
        outcome = handover.restore.value
        self.counters.restores[outcome] += 1
        took = now - handover.began_s
        self.counters.restore_s[outcome] = self.counters.restore_s.get(outcome, 0.0) + took
        handover.progress_s = now
        if short:
            current = handover.current
            self._asking.count_repair(handover, "restore", promised - handover.restored)
            handover.transfer = Half.PENDING
            if current is not None and current.first > handover.restored:
                current.reached = handover.restored
                self._asking.repair(handover, current, handover.restored, current.first, "restore")

    def _follow_transfer(self, handover: Handover, now: float) -> None:
        current = handover.current
        if current is None:
            self._asking.ask(handover, now)
            return
        intake, lease = current.intake, handover.lease
        if intake.failed:
            self._asking.repair_failed(handover, current)
            return
        if handover.restore is not Half.PENDING and lease.tail.end < current.reached:
            self._asking.repair_lost(handover, current)
            return
        current.reached = max(current.reached, lease.tail.end)
        self._load_what_came(handover)
        complete = current.complete
        if complete is not None and complete.repair >= current.repairs:
            all_offered = len(current.grants) >= complete.offers
            if all_offered and intake.idle and not handover.compute:
                handover.transfer = Half.READY
                return
            if lease.tail.end >= handover.wanted:
                handover.transfer = Half.READY
                self.counters.transfers += 1
                self.counters.transfer_s += now - handover.moving_s
                return
            if complete.last < handover.wanted and handover.compute:
                self._asking.give_up(handover, "short", f"{current.link} computed too little")
                return
            is_over = all_offered and intake.idle and handover.restore is not Half.PENDING
            if is_over and any(intake.here):
                self._manager.offers.look_again(intake)
            elif is_over:
                # What it has yielded it takes again, with what others have put there meanwhile; if
                # that is not all, the rest was lost.
                self._manager.admit(lease)
                current.reached = handover.wanted
        self._check_time(handover, current, now)

    def _load_what_came(self, handover: Handover) -> None:
        """On to the device, while the rest is still on its way: as far as there is room. Of models
        with several kinds of state nothing is of use before all has come."""
        manager, lease = self._manager, handover.lease
        if lease.load_state is LoadState.FAILED:  # the host still has it
            manager.yield_device(lease)
        if not handover.least or lease.yielded or len(manager.components) > 1:
            return
        if lease.num_host >= self._config.load_pages and lease.num_host <= manager.room():
            manager.load(lease)

    def _check_time(self, handover: Handover, current: Try, now: float) -> None:
        """A peer that has said and sent nothing for too long is given up; one that is waited for
        hears so."""
        intake, timeout_s = current.intake, self._config.timeout_s
        is_ours = intake.is_hindered(now) or current.repair is not None or current.held
        if is_ours:  # it is not the peer's turn
            handover.progress_s = now
        # Who stands in line behind others, for room or for the link, is late when nobody moves.
        moved_s = handover.progress_s if intake.idle else max(handover.progress_s, self._moved_s)
        if now - moved_s <= timeout_s:
            if now - current.said_s >= timeout_s / 4:
                current.said_s = now
                self._links.send(current.link, Wait(current.id))
        elif intake.hindered_by is not None:
            self._asking.give_up(handover, "copies", "copies to the own host do not end")
        elif intake.offers and not intake.coming:
            self._asking.give_up(handover, "room", f"no room on the own host for {timeout_s:g} s")
            self._asking.forgo_found(handover)
        else:
            self._asking.give_up(handover, "silent", f"{current.link}: nothing for {timeout_s:g} s")

    def _due_s(self, handover: Handover) -> float:
        """When it should be looked at, whether or not anything is heard of it."""
        current, timeout_s = handover.current, self._config.timeout_s
        if current is None:
            return max(handover.pause_until_s, self._clock() + self._config.first_pause_s)
        due_s = min(handover.progress_s + timeout_s, current.said_s + timeout_s / 4)
        return due_s if current.repair is None else min(due_s, current.repair.at_s)

    def _note_progress(self, handover: Handover, now: float) -> None:
        current = handover.current
        if current is not None and current.intake.num_received > current.received:
            handover.received += current.intake.num_received - current.received
            current.received = current.intake.num_received
            handover.progress_s = self._moved_s = now

    def _arrived(self, handover: Handover) -> None:
        handover.stage = Stage.READY
        del self._active[handover]
        self._asking.drop(handover)

    def _end(self, handover: Handover) -> None:
        del self.open[handover]
        self._queued.pop(handover, None)
        self._active.pop(handover, None)
        if handover.stage is not Stage.QUEUED:
            self._budget.give_back(self._claim(handover))
        self._moved_s = self._clock()
        self._on_end(handover)
