"""Flow control between engines: what waits costs nothing, what fails is tried again in its time."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from quire.disagg.config import ReceiverConfig
from quire.disagg.contacts import Patience
from quire.disagg.giving import Giver
from quire.disagg.handover import AskedPrompt, Half, Handover, Stage
from quire.disagg.receiving import Receiver
from quire.engine import build
from quire.engine.config import EngineConfig
from quire.messages import Fetch
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
    Wait,
)
from quire.types import PageStatus, num_pages
from support import MIXES, PAGE, Rig, calls_of
from unit.disagg.test_giving import LINK, Computing

HELLO = Hello(Identity(1, "m", PAGE, "f", []), "p.1", "prefill", [])


class Deciding:
    """A receiver whose peers the test plays."""

    def __init__(
        self,
        peers: tuple[str, ...] = ("p",),
        *,
        room: int = 1000,
        mix: str = "full",
        local_pages: int = 0,
    ) -> None:
        self.rig = Rig(store=False, host=200, mix=mix)
        self.said: list[tuple[float, str, PeerMessage]] = []
        self.dialled: list[str] = []
        self.hung_up: list[str] = []
        self.receiver = Receiver(
            self.rig.manager,
            self,
            name="d",
            clock=lambda: self.rig.now,
            config=ReceiverConfig(
                timeout_s=1.0, patience=Patience(5.0, 2.0, 60.0), local_pages=local_pages
            ),
            room=lambda: room,
            rng=Random(1),
        )
        self.peers = peers
        self.num = 0

    def connect(self, address: str) -> None:
        self.dialled.append(address)

    def disconnect(self, address: str) -> None:
        self.hung_up.append(address)

    def send(self, link: str, message: PeerMessage) -> bool:
        self.said.append((self.rig.now, link, message))
        return True

    def come_up(self) -> None:
        self.receiver.contacts.name(self.peers, keep=True)
        for peer in self.peers:
            self.receiver.connected(peer, replace_epoch(peer))

    def begin(self, pages: int = 4) -> Handover:
        self.num += 1
        lease = self.rig.acquire(self.rig.doc(pages, seed=self.num))
        prompt = AskedPrompt(lease.key.tokens.tobytes())
        return self.receiver.begin(f"r{self.num}", lease, prompt, list(self.peers), restore=False)

    def turn(self, seconds: float = 0.0) -> None:
        self.rig.now += seconds
        self.receiver.advance()
        self.rig.step()

    def messages(self, kind: type[PeerMessage]) -> list[tuple[float, str]]:
        return [(at, link) for at, link, message in self.said if isinstance(message, kind)]


def replace_epoch(peer: str) -> Hello:
    return Hello(HELLO.identity, f"{peer}.1", "prefill", [])


# ---- e: what waits costs nothing -----------------------------------------------------------------


def test_a_step_of_decode_does_the_same_however_many_wait_for_room() -> None:
    work = {}
    for num_waiting in (10, 1000):
        deciding = Deciding(room=4)
        for _ in range(1 + num_waiting):
            deciding.begin()
        deciding.turn()
        assert deciding.receiver.num_waiting == 1 + num_waiting
        work[num_waiting] = calls_of(deciding.receiver.advance)
    assert work[1000] == work[10]


def test_a_step_of_prefill_does_the_same_however_many_wait_for_it() -> None:
    work = {}
    for num_waiting in (10, 1000):
        rig = Rig(store=False)
        giver = Giver(
            rig.manager,
            Computing(rig, at_once=2),
            clock=lambda rig=rig: rig.now,
            send=lambda _link, _message: True,
        )
        for number in range(2 + num_waiting):
            key = rig.doc(4, seed=number)
            ask = Ask(f"a{number}", key.tokens.tobytes(), "", 0, 4, True, 30.0)
            giver.received(LINK, ask)
        giver.advance()
        work[num_waiting] = calls_of(giver.advance)
    assert work[1000] == work[10]


# ---- d: told to wait, and for how long -----------------------------------------------------------


def test_who_waits_for_a_full_prefill_server_hears_how_long_it_will_be() -> None:
    """Two at a time, one after the other in 2 s: the fifth waits for two more rounds."""
    rig, said = Rig(store=False), []

    def send(_link: str, message: PeerMessage) -> bool:
        said.append(message)
        return True

    giver = Giver(rig.manager, Computing(rig, at_once=1), clock=lambda: rig.now, send=send)
    for number in range(6):
        key = rig.doc(4, seed=number)
        giver.received(LINK, Ask(f"a{number}", key.tokens.tobytes(), "", 0, 4, True, 4.0))
    for number in range(3):
        giver.advance()
        rig.now += 2.0
        giver.received(LINK, Done(f"a{number}"))
    said.clear()
    rig.now += 1.0
    giver.advance()
    giver.flush()
    waits = {message.id: message.wait_s for message in said if isinstance(message, Wait)}
    assert waits["a3"] is None  # it is its turn
    first, second = waits["a4"], waits["a5"]
    assert first is not None
    assert second is not None
    assert 0.0 <= first < second
    assert second - first == pytest.approx(2.0, rel=0.3)


def test_the_estimate_is_shown() -> None:
    deciding = Deciding()
    deciding.come_up()
    handover = deciding.begin()
    deciding.turn()
    deciding.receiver.received("p", Wait("d-1", 7.5))
    assert handover.current is not None
    assert handover.current.estimate_s == 7.5


# ---- b: what has come stays ----------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES)
def test_what_has_come_is_not_read_again_from_the_next_peer(mix: str) -> None:
    """The first peer sends all full pages but one, and then nothing more. Of a model with windows
    or recurrent layers these are of no use by themselves: they are kept all the same."""
    deciding = Deciding(("p", "q"), mix=mix)
    deciding.come_up()
    handover = deciding.begin(pages=6)
    deciding.turn()
    offer_all(deciding, handover)
    deciding.turn()
    for read in deciding.rig.take_all(Fetch):
        if read.component == "full":
            deciding.rig.answer(read, statuses=b"\0\0\0\0\0", final=False)
    deciding.turn()
    deciding.turn(1.2)
    deciding.turn()
    assert [link for _, link in deciding.messages(Ask)] == ["p", "q"]
    offer_all(deciding, handover)
    deciding.turn()
    reads = deciding.rig.take_all(Fetch)
    assert [num_pages(read.host) for read in reads if read.component == "full"] == [1]
    for read in reads:
        deciding.rig.answer(read, statuses=PageStatus.OK)
    deciding.turn()
    deciding.turn()
    assert handover.stage is Stage.READY
    deciding.receiver.cancel(handover)
    deciding.rig.manager.release(handover.lease)
    deciding.rig.run()


def offer_all(deciding: Deciding, handover: Handover) -> None:
    current = handover.current
    assert current is not None
    components = deciding.rig.manager.components
    for number, component in enumerate(components, 100):
        first, last = component.span(current.first, handover.wanted)
        offer = Offer(current.id, component.name, number, 0, first, last - first, handover.wanted)
        deciding.receiver.received(current.link, offer)
    complete = Complete(current.id, handover.wanted, len(components), Found())
    deciding.receiver.received(current.link, complete)


# ---- c: tries are not burnt at once --------------------------------------------------------------


def test_repairs_are_spread_over_time() -> None:
    """Every read fails at once. Four repairs in 100 ms say nothing of a peer that restarts, or of
    a link that is down for a second."""
    deciding = Deciding()
    deciding.come_up()
    handover = deciding.begin()
    deciding.turn()
    for number in range(200):
        deciding.turn(0.01)
        current = handover.current
        if current is None or current.id != "d-1":
            break
        for read in deciding.rig.take_all(Fetch):
            deciding.rig.answer(read, statuses=PageStatus.FAILED)
        deciding.receiver.received("p", Offer("d-1", "full", 10 + number, 0, 0, 4, 4))
        deciding.receiver.received("p", Complete("d-1", 4, 1, Found(), current.repairs))
    times = [at for at, _ in deciding.messages(Repair)]
    assert len(times) == 4
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps == sorted(gaps)
    assert times[-1] - times[0] > 0.5


def test_a_peer_is_not_asked_again_at_once() -> None:
    """It refuses. The next one is asked at once, the same one after a pause."""
    deciding = Deciding(("p", "q"))
    deciding.come_up()
    handover = deciding.begin()
    deciding.turn()
    for _ in range(400):
        if handover.current is not None:
            current = handover.current
            refuse(deciding, current.link, current.id)
        deciding.turn(0.01)
    asked = deciding.messages(Ask)
    assert [link for _, link in asked] == ["p", "q", "p", "q"]
    assert asked[1][0] - asked[0][0] <= 0.011
    assert asked[2][0] - asked[1][0] >= 0.05
    assert handover.stage is Stage.READY  # the request computes it
    assert (handover.least, handover.transfer) == (0, Half.FAILED)


def test_those_that_failed_together_do_not_try_again_together() -> None:
    deciding = Deciding()
    deciding.come_up()
    handovers = [deciding.begin() for _ in range(8)]
    deciding.turn()
    for handover in handovers:
        assert handover.current is not None
        refuse(deciding, "p", handover.current.id)
    pauses = {handover.pause_until_s for handover in handovers}
    assert len(pauses) == 8


def test_there_is_one_budget_of_tries_however_many_peers_there_are() -> None:
    peers = tuple(f"p{number}" for number in range(16))
    deciding = Deciding(peers)
    deciding.come_up()
    handover = deciding.begin()
    for _ in range(400):
        deciding.turn(0.05)
        if handover.current is not None:
            refuse(deciding, handover.current.link, handover.current.id)
    assert len(deciding.messages(Ask)) == 6
    assert handover.stage is Stage.READY


def refuse(deciding: Deciding, link: str, name: str) -> None:
    deciding.receiver.received(link, Refused(name, "no"))


# ---- j: with nobody to ask, the request computes ------------------------------------------------


def test_with_nobody_to_ask_what_there_is_is_used_and_the_rest_computed() -> None:
    deciding = Deciding()
    deciding.rig.cache(deciding.rig.doc(4, seed=1)[:2])
    handover = deciding.begin()
    deciding.receiver.disconnected("p", "cannot be reached")
    deciding.turn()
    deciding.turn()
    assert handover.stage is Stage.READY
    assert (handover.lease.tail.end, handover.least) == (2, 0)
    assert deciding.receiver.counters.local == {"no_peer": 1}


@pytest.mark.parametrize(("missing", "asks"), [(2, False), (3, True)])
def test_what_is_sooner_computed_than_handed_over_is_not_asked_for(
    missing: int, asks: bool
) -> None:
    deciding = Deciding(local_pages=2)
    deciding.come_up()
    deciding.rig.cache(deciding.rig.doc(8, seed=1)[: 8 - missing])
    handover = deciding.begin(pages=8)
    deciding.turn()
    assert bool(deciding.messages(Ask)) == asks
    assert (handover.stage is Stage.READY, handover.least == 0) == (not asks, not asks)


def test_one_that_was_there_has_a_moment_to_come_back() -> None:
    deciding = Deciding()
    deciding.come_up()
    handover = deciding.begin()
    deciding.turn()
    deciding.receiver.disconnected("p", "the connection failed")
    deciding.turn(1.0)
    assert handover.stage is Stage.MOVING
    deciding.receiver.connected("p", HELLO)
    deciding.turn(0.5)
    assert len(deciding.messages(Ask)) == 2


# ---- g: addresses are forgotten -----------------------------------------------------------------


def test_addresses_that_nobody_names_any_more_are_not_dialled_for_ever() -> None:
    deciding = Deciding(("named",))
    deciding.receiver.contacts.name(["configured"], keep=True)
    handover = deciding.begin()
    deciding.receiver.connected("named", replace_epoch("named"))
    for _ in range(10):  # as long as it is asked it stays
        deciding.turn(20.0)
        deciding.receiver.received("named", Wait(f"d-{deciding.receiver._asking._num_asked}"))
    deciding.receiver.cancel(handover)
    assert deciding.hung_up == []
    for _ in range(6):
        deciding.turn(20.0)
    assert deciding.hung_up == ["named"]
    assert deciding.receiver.contacts.states().keys() == {"configured"}
    deciding.receiver.disconnected("named", "we disconnected")
    deciding.receiver.disconnected("in-7", "gone")
    assert len(deciding.receiver.contacts) == 1


def test_the_number_of_addresses_is_bounded() -> None:
    deciding = Deciding()
    deciding.receiver.contacts.name([f"a{number}" for number in range(300)])
    for number in range(300):
        deciding.receiver.contacts.name([f"b{number}"])
    assert len(deciding.receiver.contacts) <= 301


def test_nothing_is_due_when_nothing_is_open() -> None:
    deciding = Deciding()
    deciding.come_up()
    assert deciding.receiver.next_deadline() is None
    handover = deciding.begin()
    deciding.turn()
    due = deciding.receiver.next_deadline()
    assert due is not None
    assert due >= deciding.rig.now + 0.2
    deciding.receiver.cancel(handover)
    assert [type(m) for _, _, m in deciding.said] == [Ask, Abort]
    assert deciding.receiver.next_deadline() is None


# ---- i: counted once -----------------------------------------------------------------------------


def test_a_request_that_looks_again_is_counted_once() -> None:
    """It found two pages, let go, and found them again: two were promised, and two were there."""
    deciding = Deciding()
    deciding.come_up()
    doc = deciding.rig.doc(4, seed=1)
    deciding.rig.cache(doc[:2])
    is_counted = False
    for _ in range(3):
        lease = deciding.rig.acquire(doc)
        prompt = AskedPrompt(lease.key.tokens.tobytes())
        handover = deciding.receiver.begin("r", lease, prompt, ["p"], is_counted=is_counted)
        deciding.turn()
        is_counted = handover.is_counted
        deciding.receiver.cancel(handover)
        deciding.rig.manager.release(lease)
    counters = deciding.receiver.counters
    assert (counters.promised_pages, counters.restored_pages) == (2, 2)


def test_a_server_that_no_peer_reaches_tells_routers_what_it_has() -> None:
    config = EngineConfig(model="m", name="m", device_bytes=1 << 20, host_bytes=1 << 20)
    assert config.peer_port is None
    assert build._cache_config(config, 16, 16).event_buffer > 0
