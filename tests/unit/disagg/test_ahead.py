"""A prefill server is asked before the own store has answered; what the store brings is not read
from it."""

from __future__ import annotations

import pytest

from quire.config import PrefetchPolicy
from quire.disagg.config import ReceiverConfig
from quire.disagg.giving import Giver
from quire.disagg.handover import AskedPrompt, Handover, Stage, describe
from quire.disagg.receiving import Receiver
from quire.messages import Fetch, Probe
from quire.peer.hub import Hello
from quire.peer.identity import Identity
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
from quire.types import PageStatus, num_pages
from support import PAGE, Rig
from unit.disagg.test_giving import LINK, Computing, NothingComputed

HELLO = Hello(Identity(1, "m", PAGE, "f", []), "p.1", "prefill", [])
PAGES = 8


class Looking:
    """A hand-over of eight pages, and a store that has not answered yet."""

    def __init__(self, *, stored: int = 0, local_pages: int = 0) -> None:
        self.rig = Rig(prefetch={"policy": PrefetchPolicy.WAIT_COMPLETE})
        self.said: list[PeerMessage] = []
        self.receiver = Receiver(
            self.rig.manager,
            self,
            name="a",
            clock=lambda: self.rig.now,
            config=ReceiverConfig(timeout_s=1.0, local_pages=local_pages),
        )
        self.receiver.contacts.name(["p"])
        self.receiver.connected("p", HELLO)
        doc = self.rig.doc(PAGES, seed=1)
        if stored:
            self.rig.cache_in_store(doc[:stored])
        lease = self.rig.acquire(doc)
        prompt = AskedPrompt(lease.key.tokens.tobytes())
        self.handover: Handover = self.receiver.begin("r", lease, prompt, ["p"])
        self.receiver.advance()
        self.rig.step()
        self.probe = self.rig.take(Probe)

    def connect(self, address: str) -> None:
        pass

    def disconnect(self, address: str) -> None:
        pass

    def send(self, link: str, message: PeerMessage) -> bool:
        self.said.append(message)
        return True

    def of(self, kind: type[PeerMessage]) -> list[PeerMessage]:
        return [message for message in self.said if isinstance(message, kind)]

    def offer(self, first: int, last: int, *, number: int = 1, repair: int = 0) -> None:
        self.receiver.received("p", Offer("a-1", "full", number, 0, first, last - first, PAGES))
        self.receiver.received("p", Complete("a-1", PAGES, number, Found(), repair))

    def turn(self, seconds: float = 0.0) -> None:
        self.rig.now += seconds
        self.receiver.advance()
        self.rig.step()

    def store_answers(self) -> None:
        """It says what it has, for as long as it is asked."""
        self.rig.answer(self.probe)
        self.rig.answer_all(Probe)
        self.turn()

    def reads(self) -> tuple[list[Fetch], list[Fetch]]:
        """From the store, and from the peer."""
        self.turn()
        fetches = self.rig.take_all(Fetch)
        own = [fetch for fetch in fetches if fetch.source is None]
        return own, [fetch for fetch in fetches if fetch.source is not None]


def test_prefill_is_asked_while_the_store_is_still_asked() -> None:
    """It computes for longer than a store takes to answer: the one need not wait for the other."""
    looking = Looking()
    assert looking.handover.stage is Stage.LOOKING
    (ask,) = looking.of(Ask)
    assert isinstance(ask, Ask)
    assert (ask.first, ask.last) == (0, PAGES)


def test_what_is_told_of_it_names_it_as_the_peer_does() -> None:
    """Also when it is over, and to whom nothing is asked any more."""
    looking = Looking()
    (ask,) = looking.of(Ask)
    assert isinstance(ask, Ask)
    assert describe(looking.handover, looking.rig.now)["id"] == ask.id
    looking.receiver.cancel(looking.handover)
    assert describe(looking.handover, looking.rig.now)["id"] == ask.id


def test_what_the_store_brings_is_not_read_from_prefill() -> None:
    looking = Looking(stored=5)
    looking.offer(0, PAGES)  # all of it, at once
    assert looking.reads() == ([], [])  # not before it is known what the store has
    looking.store_answers()
    assert looking.of(Skip) == [Skip("a-1", 5)]
    own, peer = looking.reads()
    assert [num_pages(fetch.host) for fetch in own] == [5]
    assert [(num_pages(fetch.host), fetch.source.first) for fetch in peer if fetch.source] == [
        (3, 5)
    ]
    for fetch in (*own, *peer):
        looking.rig.answer(fetch, statuses=PageStatus.OK)
    looking.turn()
    assert looking.handover.stage is Stage.READY
    assert looking.handover.lease.tail.end == PAGES
    assert looking.of(Done)


def test_a_store_that_has_nothing_costs_no_second_question() -> None:
    looking = Looking()
    looking.offer(0, PAGES)
    looking.store_answers()
    own, peer = looking.reads()
    assert not own
    assert [num_pages(fetch.host) for fetch in peer] == [PAGES]
    assert len(looking.of(Ask)) == 1
    assert not looking.of(Skip)


@pytest.mark.parametrize(("stored", "local_pages"), [(PAGES, 0), (PAGES - 1, 2)])
def test_prefill_hears_that_nothing_is_wanted_of_it(stored: int, local_pages: int) -> None:
    """The store has all of it, or all but what decode computes itself."""
    looking = Looking(stored=stored, local_pages=local_pages)
    looking.store_answers()
    assert looking.of(Abort) == [Abort("a-1")]
    assert looking.handover.tries == 0
    own, peer = looking.reads()
    assert not peer
    for fetch in own:
        looking.rig.answer(fetch, statuses=PageStatus.OK)
    looking.turn()
    assert looking.handover.stage is Stage.READY
    assert looking.handover.lease.tail.end == stored


def test_what_the_store_has_lost_is_read_from_prefill_after_all() -> None:
    looking = Looking(stored=5)
    looking.offer(0, PAGES)
    looking.store_answers()
    own, peer = looking.reads()
    for fetch in peer:
        looking.rig.answer(fetch, statuses=PageStatus.OK)
    for fetch in own:
        looking.rig.answer(fetch, statuses=PageStatus.MISS)
    looking.turn()
    assert looking.of(Repair) == [Repair("a-1", 1, 0, 5, "restore")]
    looking.offer(0, 5, number=2, repair=1)
    _, again = looking.reads()
    assert [num_pages(fetch.host) for fetch in again] == [5]
    for fetch in again:
        looking.rig.answer(fetch, statuses=PageStatus.OK)
    looking.turn()
    assert looking.handover.stage is Stage.READY


def test_a_peer_that_refuses_meanwhile_is_asked_again_when_the_store_has_answered() -> None:
    looking = Looking(stored=5)
    looking.receiver.received("p", Refused("a-1", "later"))
    looking.turn()
    assert len(looking.of(Ask)) == 1
    looking.store_answers()
    looking.turn(1.0)
    first, second = looking.of(Ask)
    assert isinstance(first, Ask)
    assert isinstance(second, Ask)
    assert (first.first, second.first) == (0, 5)


def test_a_peer_whose_offers_wait_for_the_store_is_not_late_and_hears_so() -> None:
    looking = Looking()
    looking.offer(0, PAGES)
    for _ in range(6):
        looking.turn(0.5)
    assert not looking.of(Abort)
    assert len(looking.of(Wait)) == 6
    deadline = looking.receiver.next_deadline()
    assert deadline is not None
    assert deadline > looking.rig.now  # nobody spins


def test_who_computes_what_few_pages_are_missing_asks_nobody() -> None:
    looking = Looking(local_pages=PAGES)
    assert not looking.of(Ask)


def test_a_giver_has_room_for_others_where_pages_need_not_be_offered() -> None:
    """Two of eight pages fit a host of twelve together once one of them wants three."""
    rig = Rig(store=False, host=12)
    sent: list[PeerMessage] = []
    giver = Giver(
        rig.manager,
        Computing(rig, at_once=2),
        clock=lambda: rig.now,
        send=lambda _link, message: sent.append(message) is None,
    )
    for name in ("a", "b"):
        tokens = rig.doc(PAGES, seed=ord(name)).tokens.tobytes()
        giver.received(LINK, Ask(name, tokens, "", 0, PAGES, True, 30.0))
    giver.advance()
    assert [handout.begun for handout in giver.open.values()] == [True, False]
    giver.received(LINK, Skip("a", 5))
    giver.advance()
    assert [handout.begun for handout in giver.open.values()] == [True, True]
    for name in ("a", "b"):
        giver.received(LINK, Abort(name))
    assert not any(giver._budget.taken)


def test_what_was_granted_before_it_was_skipped_keeps_its_room() -> None:
    """Its pages are still held: who was let in beside them might find none."""
    rig = Rig(store=False, host=12)
    key = rig.doc(PAGES, seed=1)
    rig.cache(key)
    giver = Giver(
        rig.manager,
        NothingComputed(rig),
        clock=lambda: rig.now,
        send=lambda _link, _message: True,
    )
    giver.received(LINK, Ask("a", key.tokens.tobytes(), "", 0, PAGES, False, 30.0))
    giver.advance()
    taken = giver._budget.taken
    giver.received(LINK, Skip("a", 5))
    assert giver._budget.taken == taken == (PAGES,)
    giver.received(LINK, Abort("a"))
    assert not any(giver._budget.taken)
