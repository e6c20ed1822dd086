"""PeerHub: links that come up, stay up, are refused or lost, each with its reason; never a wait."""

import contextlib
import threading
import time

import msgspec
import pytest

from quire.errors import ConfigError
from quire.messages import PeerPart
from quire.peer import messages
from quire.peer.errors import PeerError
from quire.peer.greet import shake_hands
from quire.peer.handshake import Handshake, Purpose, Side
from quire.peer.hub import Connected, Disconnected, Hello, HubLimits, PeerHub, Received
from quire.peer.messages import Abort, Beat, Done, Refused
from quire.peer.tcp import TcpTransport
from unit.peer.rig import SECRET, WAIT_S, Pair, bother, identity_of, raw_socket, wait_until

QUICK = HubLimits(first_retry_s=0.01, last_retry_s=0.05)


def hello(epoch="a", identity=None, parts=()):
    return Hello(identity or identity_of(), epoch, "unified", list(parts))


class HandClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def hubs():
    """Makes hubs, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(epoch="a", *, secret=SECRET, listen="tcp://127.0.0.1:0", limits=QUICK, **options):
            greeting = hello(epoch, options.pop("identity", None), options.pop("parts", ()))
            hub = PeerHub(greeting, secret, listen=listen, limits=limits, **options)
            stack.callback(hub.close)
            return hub

        yield make


def collect(hub, enough):
    """Poll until `enough(events so far)`."""
    events = []

    def look():
        events.extend(hub.poll())
        return enough(events)

    wait_until(look)
    return events


def event(hub, kind):
    return next(
        e
        for e in collect(hub, lambda es: any(isinstance(e, kind) for e in es))
        if isinstance(e, kind)
    )


def linked(asker, holder):
    """Connect, and the names of the link on either side."""
    asker.connect(holder.address)
    return event(asker, Connected).link, event(holder, Connected).link


def received(hub, count):
    events = collect(hub, lambda es: sum(isinstance(e, Received) for e in es) >= count)
    return [e.message for e in events if isinstance(e, Received)]


def by_hand(connection, side, secret=SECRET):
    """Through the handshake of leaders, with a Hello of epoch "hand"."""
    connection.set_deadline(time.monotonic() + WAIT_S)
    card = msgspec.msgpack.encode(hello("hand"))
    handshake = Handshake(side, Purpose.CONTROL, secret, card, lambda card: None)
    shake_hands(connection, handshake, dials=side is Side.DIALER)
    return connection


# ---- links --------------------------------------------------------------------------------------


def test_two_leaders_meet_and_talk_both_ways(hubs):
    part = PeerPart("tcp://10.1.2.3:5", 0, 2)
    asker, holder = hubs("a"), hubs("b", parts=[part])
    assert not asker.send(holder.address, Beat())  # not connected yet
    asker.connect(holder.address)
    asker.connect(holder.address)  # once is enough
    assert event(asker, Connected) == Connected(holder.address, hello("b", parts=[part]))
    assert event(holder, Connected) == Connected("in-1", hello("a"))
    sent = [Done(f"x{i}") for i in range(50)]
    assert all(asker.send(holder.address, message) for message in sent)
    assert received(holder, 50) == sent
    assert holder.send("in-1", Refused("x", "busy"))
    assert received(asker, 1) == [Refused("x", "busy")]
    assert asker.poll() == holder.poll() == []


def test_a_host_that_is_open_is_filled_in_by_who_hears_of_it(hubs):
    parts = [PeerPart("tcp://0.0.0.0:5", 0, 1), PeerPart("tcp://[::]:6", 1, 2)]
    asker, holder = hubs("a"), hubs("b", parts=parts)
    asker.connect(holder.address)
    found = event(asker, Connected).hello.parts
    assert [part.address for part in found] == ["tcp://127.0.0.1:5", "tcp://127.0.0.1:6"]


def test_a_link_comes_back_when_the_other_engine_does(hubs):
    asker, holder = hubs("a"), hubs("b")
    linked(asker, holder)
    address = holder.address
    holder.close()
    assert event(asker, Disconnected) == Disconnected(address, "the peer closed the connection")
    assert not asker.send(address, Beat())
    reason = event(asker, Disconnected).reason
    assert reason == f"{address} cannot be reached (Connection refused): is the engine running?"
    again = hubs("c", listen=address)
    assert event(asker, Connected).hello.epoch == "c"
    assert asker.send(address, Done("x"))
    assert received(again, 1) == [Done("x")]


def test_disconnecting_ends_the_link_on_both_sides(hubs):
    asker, holder = hubs("a"), hubs("b")
    ours, theirs = linked(asker, holder)
    asker.disconnect(ours)
    assert event(asker, Disconnected) == Disconnected(ours, "we disconnected")
    assert event(holder, Disconnected).link == theirs
    assert not asker.send(ours, Beat())
    asker.connect(ours)
    asker.disconnect(ours)
    asker.connect(ours)
    assert event(asker, Connected).link == ours
    wait_until(lambda: asker.send(ours, Done("x")))


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"secret": "wrong"}, "the secrets differ: set the same peer_secret on both sides"),
        ({"identity": identity_of(model="z")}, "weights are m and ours are z: serve the same"),
        (
            {"identity": msgspec.structs.replace(identity_of(), page_size=9)},
            "the peer's page size is 4 and ours is 9",
        ),
        (
            {"identity": msgspec.structs.replace(identity_of(), version=9)},
            "the peer speaks format version 3 and we speak 9",
        ),
    ],
)
def test_a_refusal_reaches_the_one_who_asked_and_nobody_else(hubs, options, sentence):
    asker, holder = hubs("a", **options), hubs("b")
    asker.connect(holder.address)
    lost = event(asker, Disconnected)
    assert lost.link == holder.address
    assert lost.reason.startswith(f"{holder.address} did not let us in: the peer refused: ")
    assert sentence in lost.reason
    wait_until(lambda: holder.strangers)
    assert holder.poll() == []


def test_an_engine_is_no_peer_of_its_own(hubs):
    hub = hubs("a")
    hub.connect(hub.address)
    (lost,) = collect(hub, bool)
    assert "is this engine itself" in lost.reason


def test_the_port_of_pages_is_not_the_port_of_leaders(hubs):
    hub = hubs("a")
    with Pair() as pair:
        hub.connect(pair.server.address)
        assert "this port is for pages, not for control" in event(hub, Disconnected).reason


def test_what_cannot_be_is_refused_at_once(hubs):
    hub = hubs("a")
    for address in ("rubbish", "udp://h:1"):
        with pytest.raises(ConfigError, match="tcp://host:port"):
            hub.connect(address)
    with pytest.raises(ConfigError, match="cannot listen on"):
        hubs("b", listen=hub.address)
    with pytest.raises(ConfigError, match="tcp://host:port"):
        hubs("b", listen="tcp://127.0.0.1")
    with pytest.raises(ConfigError, match="cannot listen on tcp://no-such-host"):
        hubs("b", listen="tcp://no-such-host.invalid:0")
    with pytest.raises(ConfigError, match="peer_secret is empty"):
        hubs("b", secret="")
    assert hubs("c", listen=None).address == ""


# ---- strangers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_rubbish_on_the_port_changes_nothing(hubs, seed):
    asker, holder = hubs("a"), hubs("b")
    bother(holder.address, seed)
    linked(asker, holder)
    bother(holder.address, seed + 100)
    assert asker.send(holder.address, Done("x"))
    assert received(holder, 1) == [Done("x")]


def test_a_peer_that_stops_making_sense_is_dropped(hubs):
    hub = hubs("a")
    for data in (b"\x03\x00\x00\x00\xc1\xc1\xc1", b"\xff\xff\xff\xff"):
        connection = TcpTransport().dial(hub.address, time.monotonic() + WAIT_S)
        by_hand(connection, Side.DIALER)
        connection.send_views([memoryview(data)])
        assert "does not keep to the protocol" in event(hub, Disconnected).reason
        with pytest.raises((EOFError, OSError)):
            connection.recv_frame(100)
        connection.close()


def test_a_hello_with_addresses_that_are_none_is_not_let_in(hubs):
    asker, holder = hubs("a", parts=[PeerPart("nonsense", 0, 1)]), hubs("b")
    asker.connect(holder.address)
    assert "did not let us in" in event(asker, Disconnected).reason
    assert holder.poll() == []


def test_more_links_than_allowed_are_closed_at_once(hubs):
    hub = hubs("a", limits=HubLimits(max_incoming=1))
    linked(hubs("b"), hub)
    with raw_socket(hub.address) as one_more:
        assert one_more.recv(1) == b""


def test_those_who_say_nothing_keep_nobody_out(hubs):
    hub, other = hubs("a", limits=HubLimits(max_strangers=2)), hubs("b")
    with raw_socket(hub.address) as first, raw_socket(hub.address):
        wait_until(lambda: hub._num_incoming == 2)
        linked(other, hub)
        assert first.recv(1) == b""


# ---- liveness and bounds ------------------------------------------------------------------------


class Mute:
    """A leader that lets others in, and then does nothing by itself."""

    def __init__(self):
        self._listener = TcpTransport().listen("tcp://127.0.0.1:0")
        self.address = self._listener.address
        self.connections = []
        self._accepted = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        while (connection := self._listener.accept()) is not None:
            self._accepted.append(connection)
            with contextlib.suppress(OSError, EOFError, PeerError):
                self.connections.append(by_hand(connection, Side.LISTENER))

    def close(self):
        self._listener.close()
        for connection in self._accepted:
            connection.interrupt()
        self._thread.join()
        for connection in self._accepted:  # let in or not
            connection.close()


@pytest.fixture
def mute():
    leader = Mute()
    yield leader
    leader.close()


def test_a_link_without_a_word_is_given_up(hubs, mute):
    clock = HandClock()
    limits = HubLimits(beat_s=0.1, silence_s=10.0, first_retry_s=60.0, last_retry_s=60.0)
    hub = hubs("a", clock=clock, limits=limits)
    hub.connect(mute.address)
    event(hub, Connected)
    clock.now += 9.9
    assert hub.poll() == []
    clock.now += 0.2
    assert event(hub, Disconnected) == Disconnected(mute.address, "no sign of life for 10.1 s")


def test_a_beat_goes_out_by_itself(hubs, mute):
    hub = hubs("a", limits=HubLimits(beat_s=0.05))
    hub.connect(mute.address)
    event(hub, Connected)
    wait_until(lambda: mute.connections)
    for _ in range(3):
        assert messages.decode(mute.connections[0].recv_frame(100)) == Beat()


def test_beats_are_not_news_but_keep_a_link(hubs):
    asker, holder = (hubs(name, limits=HubLimits(beat_s=0.02)) for name in "ab")
    linked(asker, holder)
    heard = {hub: next(iter(hub._links.values())).heard for hub in (asker, holder)}
    wait_until(lambda: all(next(iter(h._links.values())).heard > t for h, t in heard.items()))
    assert asker.poll() == holder.poll() == []


def test_a_peer_that_does_not_read_fills_its_queue_and_no_more(hubs, mute):
    hub = hubs("a", limits=HubLimits(max_queued=20, max_queued_bytes=1 << 20))
    hub.connect(mute.address)
    event(hub, Connected)
    message = Abort("x" * 100_000)
    for _ in range(10_000):
        if not hub.send(mute.address, message):
            break
    else:
        pytest.fail("the queue has no bound")
    (link,) = hub._links.values()
    assert link.outgoing_bytes <= 1 << 20


def test_a_message_longer_than_any_may_be_is_not_sent(hubs):
    asker, holder = hubs("a", limits=HubLimits(max_message_bytes=1000)), hubs("b")
    link, _ = linked(asker, holder)
    assert not asker.send(link, Abort("x" * 2000))
    assert asker.send(link, Abort("x"))


def test_one_who_does_not_poll_is_sent_no_more_than_fits_and_loses_nothing(hubs):
    asker, holder = hubs("a"), hubs("b", limits=HubLimits(max_queued=10))
    link, _ = linked(asker, holder)
    sent = [Done(str(i)) for i in range(200)]
    assert all(asker.send(link, message) for message in sent)
    wait_until(lambda: len(holder._events) >= 10)
    assert len(holder._events) <= 11
    assert received(holder, 200) == sent


def test_a_long_prompt_fits(hubs):
    asker, holder = hubs("a"), hubs("b")
    link, _ = linked(asker, holder)
    long = Abort("x" * 4 * 1_000_000)  # as long as an Ask for a million tokens
    assert asker.send(link, long)
    assert received(holder, 1) == [long]


def test_closing_twice_and_using_it_afterwards_does_nothing(hubs):
    asker, holder = hubs("a"), hubs("b")
    link, _ = linked(asker, holder)
    asker.close()
    asker.close()
    asker.connect("tcp://127.0.0.1:1")
    assert asker.poll() == []


def test_closing_ends_whatever_is_under_way(hubs):
    """Dials, handshakes, links and pauses, caught at many moments."""
    for i in range(20):
        first = hubs("a", secret="x" if i % 3 == 0 else SECRET)
        second = hubs("b")
        first.connect(second.address)
        second.connect(first.address)
        time.sleep(0.001 * i)
        if i % 2:
            first.disconnect(second.address)
        second.close()
        first.close()
        assert not first._thread.is_alive()
        assert not second._thread.is_alive()
