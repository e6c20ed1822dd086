"""Who gets room for what a peer is to send, and when."""

from __future__ import annotations

import pytest

from quire.components import PoolSize
from quire.config import WriteConfig, WritePolicy
from quire.disagg.config import ReceiverConfig
from quire.disagg.handover import AskedPrompt, Handover, Stage
from quire.disagg.receiving import Receiver
from quire.manager.operations import COPY_TIMEOUT_S
from quire.messages import Backup, Fetch, Probe
from quire.peer.hub import Hello
from quire.peer.identity import Identity
from quire.peer.messages import Abort, Ask, Complete, Found, Offer, PeerMessage, Repair, Wait
from quire.types import PageStatus
from support import MIXES, PAGE, WINDOW_PAGES, Rig


class NoLinks:
    """Nobody is reached."""

    def connect(self, address: str) -> None:
        pass

    def disconnect(self, address: str) -> None:
        pass

    def send(self, link: str, message: PeerMessage) -> bool:
        return False


def test_room_is_given_in_the_order_of_arrival_c46() -> None:
    """A small one that comes later does not overtake: it would do so again and again."""
    rig = Rig(store=False)
    receiver = Receiver(rig.manager, NoLinks(), name="a", clock=lambda: rig.now, room=lambda: 10)
    handovers = []
    for seed, pages in enumerate((6, 6, 2), 1):
        lease = rig.acquire(rig.doc(pages, seed=seed))
        prompt = AskedPrompt(lease.key.tokens.tobytes())
        handovers.append(receiver.begin(f"r{seed}", lease, prompt, ["tcp://p:1"], restore=False))
    receiver.advance()
    assert [h.stage for h in handovers] == [Stage.MOVING, Stage.QUEUED, Stage.QUEUED]
    receiver.cancel(handovers[0])
    receiver.advance()
    assert [h.stage for h in handovers[1:]] == [Stage.MOVING, Stage.MOVING]


def test_who_waits_for_room_holds_nothing_and_finds_it_again() -> None:
    """Those who move may need what it found: if it kept that, they would wait for each other."""
    rig = Rig(store=False)
    receiver = Receiver(rig.manager, NoLinks(), name="a", clock=lambda: rig.now, room=lambda: 10)
    docs = [rig.doc(8, seed=seed) for seed in (1, 2)]
    rig.cache_on_host(docs[1][:4])
    leases = [rig.acquire(doc) for doc in docs]
    handovers = [
        receiver.begin(f"r{n}", lease, AskedPrompt(lease.key.tokens.tobytes()), ["tcp://p:1"])
        for n, lease in enumerate(leases)
    ]
    receiver.advance()
    assert [h.stage for h in handovers] == [Stage.MOVING, Stage.QUEUED]
    assert leases[1].tail.end == 0
    receiver.cancel(handovers[0])
    receiver.advance()
    assert leases[1].tail.end == 4
    rig.manager.check_invariants()


def test_what_somebody_else_computed_meanwhile_is_not_promised_twice_c26() -> None:
    """The store is asked for all of it, and by the time of its answer the first pages are here:
    counted twice they hid that the rest never came, and the request computed it here."""
    rig = Rig()
    doc = rig.doc(6, seed=1)
    rig.cache_in_store(doc)
    receiver = Receiver(rig.manager, NoLinks(), name="a", clock=lambda: rig.now)
    lease = rig.acquire(doc)
    handover = receiver.begin("r", lease, AskedPrompt(doc.tokens.tobytes()), ["tcp://p:1"])
    receiver.advance()
    rig.step()
    asked = rig.take(Probe)
    rig.cache(doc[:2])
    rig.answer(asked)
    rig.answer_all(Probe)
    receiver.advance()
    assert handover.match is not None
    assert (handover.match.store, handover.promised, handover.wanted) == (4, 6, 6)
    rig.answer(rig.take(Fetch), statuses=PageStatus.MISS)
    receiver.advance()
    assert handover.stage is Stage.MOVING  # a peer is to send what the store did not


class Reading:
    """Two hand-overs whose pages a peer has offered; the test answers the reads."""

    def __init__(self, cached: int = 0) -> None:
        """`cached`: pages of the first that are on the device alone."""
        self.rig = Rig(store=False, write=WriteConfig(WritePolicy.WRITE_BACK))
        self.said: list[PeerMessage] = []
        self.receiver = Receiver(
            self.rig.manager,
            self,
            name="a",
            clock=lambda: self.rig.now,
            config=ReceiverConfig(timeout_s=1.0),
        )
        if cached:
            self.rig.cache(self.rig.doc(8, seed=1)[:cached])
        self.receiver.contacts.name(["p"])
        self.receiver.connected("p", Hello(Identity(1, "m", PAGE, "f", []), "p.1", "prefill", []))
        self.handovers = [self._begin(seed) for seed in (1, 2)]
        self.receiver.advance()
        for number, handover in enumerate(self.handovers, 1):
            name = f"a-{number}"
            first = handover.lease.tail.end
            self.receiver.received("p", Offer(name, "full", number, 0, first, 8 - first, 8))
            self.receiver.received("p", Complete(name, 8, 1, Found()))
        self.rig.step()
        self.reads = self.rig.take_all(Fetch)

    def _begin(self, seed: int) -> Handover:
        lease = self.rig.acquire(self.rig.doc(8, seed=seed))
        prompt = AskedPrompt(lease.key.tokens.tobytes())
        return self.receiver.begin(f"r{seed}", lease, prompt, ["p"], restore=False)

    def connect(self, address: str) -> None:
        pass

    def disconnect(self, address: str) -> None:
        pass

    def send(self, link: str, message: PeerMessage) -> bool:
        self.said.append(message)
        return True

    def wait(self, seconds: float) -> None:
        self.rig.now += seconds
        self.receiver.advance()
        self.rig.step()


def test_who_stands_behind_others_is_late_only_when_nobody_moves_c45() -> None:
    """More is on its way than the link moves in the time of one: the first moves, page by page."""
    reading = Reading()
    first, second = reading.handovers
    for page in range(7):
        reading.rig.answer(reading.reads[0], first=page, statuses=b"\0", final=False)
        reading.wait(0.75)
    assert not [m for m in reading.said if isinstance(m, Abort)]
    assert (first.tries, second.tries) == (1, 1)
    assert first.lease.tail.end == 7  # what has come is there, though its read goes on
    reading.wait(1.25)
    assert [m.id for m in reading.said if isinstance(m, Abort)] == ["a-1", "a-2"]
    assert first.lease.tail.end == 7


def test_a_peer_hears_that_it_is_still_read_from_c45() -> None:
    reading = Reading()
    for page in range(3):
        reading.rig.answer(reading.reads[0], first=page, statuses=b"\0", final=False)
        reading.wait(0.5)
    waits = [m.id for m in reading.said if isinstance(m, Wait)]
    assert waits == ["a-1", "a-2"] * 3


def test_what_was_let_go_of_meanwhile_is_asked_for_again_c26() -> None:
    """The first pages were on the device alone, and somebody needed the device."""
    reading = Reading(cached=2)
    first = reading.handovers[0]
    assert first.current is not None
    assert first.current.first == 2
    reading.rig.manager.yield_device(first.lease)
    reading.wait(0.0)
    assert [m for m in reading.said if isinstance(m, Repair)] == [Repair("a-1", 1, 0, 2, "lost")]
    reading.receiver.received("p", Offer("a-1", "full", 9, 0, 0, 2, 8))
    reading.receiver.received("p", Complete("a-1", 8, 2, Found(), 1))
    reading.wait(0.0)
    for read in (*reading.rig.take_all(Fetch), reading.reads[0]):
        reading.rig.answer(read, statuses=PageStatus.OK)
    reading.wait(0.0)
    assert first.stage is Stage.READY


def test_a_page_that_was_asked_for_again_before_it_came_may_come_twice() -> None:
    """Another had put it into the tree meanwhile, and it was let go of again."""
    reading = Reading()
    first = reading.handovers[0]
    assert first.current is not None
    first.current.reached = 2
    reading.wait(0.0)
    assert [m.first for m in reading.said if isinstance(m, Repair)] == [0]
    reading.receiver.received("p", Offer("a-1", "full", 9, 0, 0, 2, 8))
    reading.rig.step()
    again = reading.rig.take_all(Fetch)
    rig, reads = reading.rig, [*again, reading.reads[0]]
    rig.step([r for read in reads for r in rig.reports(read, statuses=PageStatus.OK)])
    rig.manager.release(first.lease)
    rig.run()


class Giving:
    """Hand-overs of prompts whose head the own host has; a peer offers all that is asked for, and
    every read goes well."""

    def __init__(self, mix: str, *, num_prompts: int, slots: int, windows: int) -> None:
        """`slots`, `windows`: on the host."""
        pools = {"recurrent": PoolSize(64, slots), "window": PoolSize(64, windows)}
        self.rig = Rig(
            store=False, mix=mix, pools={name: pools[name] for name in mix.split("+")[1:]}
        )
        self.asked: list[Ask] = []
        self.receiver = Receiver(
            self.rig.manager,
            self,
            name="a",
            clock=lambda: self.rig.now,
            config=ReceiverConfig(timeout_s=1.0),
        )
        self.receiver.contacts.name(["p"])
        self.receiver.connected("p", Hello(Identity(1, "m", PAGE, "f", []), "p.1", "prefill", []))
        docs = [self.rig.doc(8, seed=seed) for seed in range(1, num_prompts + 1)]
        for doc in docs:
            self.rig.cache_on_host(doc[:4])
        self.handovers = [
            self.receiver.begin(
                f"r{n}", lease, AskedPrompt(lease.key.tokens.tobytes()), ["p"], restore=False
            )
            for n, lease in enumerate(map(self.rig.acquire, docs))
        ]

    def connect(self, address: str) -> None:
        pass

    def disconnect(self, address: str) -> None:
        pass

    def send(self, link: str, message: PeerMessage) -> bool:
        if isinstance(message, Ask):
            self.asked.append(message)
        return True

    def turn(self) -> None:
        """One step: what is asked for is offered, what is read comes, what is ready goes on."""
        self.rig.now += 0.3
        self.receiver.advance()
        asked, self.asked = self.asked, []
        components = self.rig.manager.components
        for ask in asked:
            spans = [(c.name, *c.span(ask.first, ask.last)) for c in components]
            for number, (name, first, last) in enumerate(spans, 1):
                offer = Offer(ask.id, name, number, 0, first, last - first, ask.last)
                self.receiver.received("p", offer)
            self.receiver.received("p", Complete(ask.id, ask.last, len(spans), Found()))
        self.rig.step()
        for read in self.rig.take_all(Fetch):
            self.rig.answer(read, statuses=PageStatus.OK)
        self.rig.run()
        for handover in self.handovers:
            if handover.stage is Stage.READY and not handover.lease.released:
                self.receiver.cancel(handover)
                self.rig.manager.release(handover.lease)


@pytest.mark.parametrize("mix", MIXES)
def test_those_who_move_together_have_room_for_what_they_found_and_for_their_end(mix: str) -> None:
    """Each holds the state where its own part ends until that at the end has come. If only the
    latter counted, all would move, and wait for room that the others hold."""
    giving = Giving(mix, num_prompts=4, slots=4, windows=8)
    for _ in range(16):
        giving.turn()
    assert [(h.stage, h.tries) for h in giving.handovers] == [(Stage.READY, 1)] * 4
    assert [h.received > 0 for h in giving.handovers] == [True] * 4


@pytest.mark.parametrize("mix", ["full+window", "full+recurrent"])
def test_on_a_host_too_small_for_both_what_was_found_goes(mix: str) -> None:
    giving = Giving(mix, num_prompts=2, slots=1, windows=WINDOW_PAGES + 1)
    for _ in range(16):
        giving.turn()
    assert [(h.stage, h.tries) for h in giving.handovers] == [(Stage.READY, 1)] * 2


def test_a_peer_has_its_time_for_a_repair() -> None:
    """A read was long in failing while others moved: that is no silence of the peer."""
    reading = Reading()
    for page in range(3):
        reading.rig.answer(reading.reads[0], first=page, statuses=b"\0", final=False)
        reading.wait(0.75)
    reading.rig.answer(reading.reads[1], statuses=PageStatus.FAILED)
    reading.wait(0.0)
    assert [m.id for m in reading.said if isinstance(m, Repair)] == ["a-2"]
    reading.wait(0.5)
    assert not [m for m in reading.said if isinstance(m, Abort)]


def test_own_copies_are_not_waited_for_for_ever() -> None:
    """What has come waits for copies of the same pages from the own device. While those have their
    time that is not the peer's fault; but they may never end."""
    giving = Giving("full+window", num_prompts=1, slots=0, windows=64)
    rig, (handover,) = giving.rig, giving.handovers
    giving.receiver.advance()
    assert handover.stage is Stage.MOVING
    rig.manager.release(rig.compute(rig.doc(8, seed=1)))
    rig.step()
    copies = rig.take_all(Backup)
    giving.turn()
    assert handover.current is not None
    hindrance = handover.current.intake.hindered_by
    assert hindrance is not None
    end_s = rig.now + COPY_TIMEOUT_S
    while rig.now < end_s:
        giving.turn()
        assert (handover.stage, handover.tries) == (Stage.MOVING, 1)
    for _ in range(5):
        giving.turn()
    assert (handover.tries, handover.repaired.keys()) == (2, {"copies"})
    for copy in copies:
        rig.answer(copy)
    giving.turn()
    giving.turn()
    assert handover.stage is Stage.READY
