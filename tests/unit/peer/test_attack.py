"""By attack: a neighbour that reads and rewrites the wire; a peer that wants another's pages."""

import contextlib
import socket
import ssl
import threading
import time

import pytest

from quire.peer import protocol
from quire.peer.certificate import certificate_of
from quire.peer.errors import PeerError
from quire.peer.greet import shake_hands
from quire.peer.handshake import Side, page_handshake
from quire.peer.hub import Connected, Disconnected, Hello, PeerHub, Received
from quire.peer.messages import Ask
from quire.peer.server import ServerLimits
from quire.peer.sockets import SocketConnection
from quire.peer.tcp import TcpTransport
from quire.peer.tls import check_certificate, tls_context
from quire.types import PageStatus
from unit.peer.rig import (
    EPOCH,
    GRANT,
    SECRET,
    TICKETS,
    WAIT_S,
    Pair,
    answer,
    dial_in,
    identity_of,
    source,
)

TOKENS = b"what the user said, which is nobody else's business" * 4


class Wire:
    """Between two ends: all that passes is seen, and may be changed."""

    def __init__(self, address, change=lambda data, is_answer: data):
        self._target = address
        self._change = change
        self._listener = TcpTransport().listen("tcp://127.0.0.1:0")
        self.address = self._listener.address
        self.seen = bytearray()
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while (connection := self._listener.accept()) is not None:
            there = TcpTransport().dial(self._target, time.monotonic() + WAIT_S)
            ends = connection._socket, there._socket
            self._sockets += ends
            for one, other, is_answer in ((*ends, False), (*ends[::-1], True)):
                threading.Thread(
                    target=self._pump, args=(one, other, is_answer), daemon=True
                ).start()

    def _pump(self, one, other, is_answer):
        try:
            while data := one.recv(1 << 16):
                self.seen += data
                other.sendall(self._change(data, is_answer))
        except OSError:
            pass
        finally:
            for sock in (one, other):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()
        for sock in self._sockets:
            sock.close()


def hub_of(name, listen=None):
    return PeerHub(Hello(identity_of(), name, "unified", []), SECRET, listen=listen)


def event(hub, kind):
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for found in hub.poll():
            if isinstance(found, kind):
                return found
        time.sleep(0.005)
    raise AssertionError(f"no {kind.__name__}")


def test_a_neighbour_on_the_wire_reads_no_prompt():
    giver, receiver = hub_of("a", "tcp://127.0.0.1:0"), hub_of("b")
    wire = Wire(giver.address)
    try:
        receiver.connect(wire.address)
        event(receiver, Connected)
        ask = Ask("x", TOKENS, "", 0, 1, True, 1.0)
        assert receiver.send(wire.address, ask)
        assert event(giver, Received).message == ask
        assert TOKENS[:16] not in bytes(wire.seen)
    finally:
        for each in (receiver, giver, wire):
            each.close()


def test_a_message_that_was_rewritten_ends_the_link():
    changing = threading.Event()

    def change(data, is_answer):
        if not changing.is_set() or is_answer:
            return data
        return data[:-1] + bytes([data[-1] ^ 1])

    giver, receiver = hub_of("a", "tcp://127.0.0.1:0"), hub_of("b")
    wire = Wire(giver.address, change)
    try:
        receiver.connect(wire.address)
        event(receiver, Connected)
        link = event(giver, Connected).link
        changing.set()
        assert receiver.send(wire.address, Ask("x", TOKENS, "", 0, 1, True, 1.0))
        assert event(giver, Disconnected).link == link
    finally:
        for each in (receiver, giver, wire):
            each.close()


@pytest.fixture
def remote(monkeypatch):
    monkeypatch.setattr(SocketConnection, "is_local", False)


@pytest.mark.usefixtures("remote")
def test_pages_between_machines_are_hidden_and_cannot_be_changed():
    """A bit that changes on the way is no page that is put into a cache and a shared store."""
    flip = threading.Event()

    def change(data, is_answer):
        if is_answer and flip.is_set() and len(data) > 200:
            return data[:100] + bytes([data[100] ^ 1]) + data[101:]
        return data

    with Pair(streams=1) as pair:
        wire = Wire(pair.server.address, change)
        try:
            there = source((wire.address, 0, 2))

            def read():
                return pair.client.read(there, pair.region, range(4), timeout_s=WAIT_S)

            whole = read()
            assert whole == [PageStatus.OK] * len(whole)
            held = bytes(pair.held.page_view(0)[:64])
            assert any(held)
            assert held not in bytes(wire.seen)
            flip.set()
            assert PageStatus.OK not in read()
        finally:
            wire.close()


def test_one_side_alone_cannot_do_without_encryption():
    """A proxy makes one end look near. It says so, and the other does not."""
    for mine in (True, False):
        dialer = page_handshake(Side.DIALER, SECRET, identity_of(), is_local=mine)
        listener = page_handshake(Side.LISTENER, SECRET, identity_of(), is_local=not mine)
        proof = dialer.feed(listener.feed(dialer.start()))
        dialer.feed(listener.feed(proof))
        assert dialer.encrypts
        assert listener.encrypts


def test_who_shook_hands_is_who_speaks_under_tls():
    """One that knows the secret passes the handshake on to another, and then speaks itself."""
    listener = TcpTransport().listen("tcp://127.0.0.1:0")
    ours = TcpTransport().dial(listener.address, time.monotonic() + WAIT_S)
    theirs = listener.accept()
    assert theirs is not None
    for end in (ours, theirs):
        end.set_deadline(time.monotonic() + WAIT_S)
    errors = []

    def listen():
        handshake = page_handshake(Side.LISTENER, SECRET, identity_of())
        handshake.seal = lambda side: b"\0" * 32  # it cannot know the nonces of that handshake
        try:
            shake_hands(theirs, handshake, dials=False)
        except (PeerError, OSError, EOFError) as error:
            errors.append(error)
            theirs.close()

    thread = threading.Thread(target=listen)
    thread.start()
    with pytest.raises((PeerError, OSError, EOFError)):
        shake_hands(ours, page_handshake(Side.DIALER, SECRET, identity_of()), dials=True)
    ours.close()
    thread.join()
    theirs.close()
    listener.close()


def test_a_peer_with_the_secret_cannot_read_what_was_granted_to_another():
    with Pair() as pair:
        thief = dial_in(pair.server.address)
        for ticket in (b"", b"\0" * 16, TICKETS.of(GRANT + 1)):
            read = protocol.Read(EPOCH, GRANT, "full", 0, 1, 0, 2, wait_s=0.0, ticket=ticket)
            thief.send_frame(protocol.encode(read))
            assert answer(thief)[0].statuses == bytes([PageStatus.MISS])
        thief.close()
        assert pair.read()[0] is PageStatus.OK


def test_the_certificate_is_that_of_the_secret_and_of_no_other():
    one, same, other = (certificate_of(secret) for secret in ("a" * 20, "a" * 20, "b" * 20))
    assert one == same
    assert one.der != other.der
    with pytest.raises(PeerError):
        check_certificate("a" * 20, other.der)
    server, client = (tls_context("a" * 20, is_server=True), tls_context("b" * 20, is_server=False))
    near, far = socket.socketpair()
    failed = []

    def accept():
        try:
            server.wrap_socket(far, server_side=True).close()
        except (ssl.SSLError, OSError) as error:
            failed.append(error)
            far.close()

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(ssl.SSLError):
        client.wrap_socket(near)
    near.close()
    thread.join()
    assert failed


def test_silent_strangers_do_not_keep_peers_out():
    limits = ServerLimits(max_strangers=8)
    with Pair(server={"limits": limits}) as pair:
        host, port = pair.server.address.removeprefix("tcp://").rsplit(":", 1)
        silent = [socket.create_connection((host, int(port))) for _ in range(64)]
        assert pair.read()[0] is PageStatus.OK
        for sock in silent:
            sock.close()
