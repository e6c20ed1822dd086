"""Transports: found by scheme; TCP keeps deadlines, limits and the order of bytes."""

import threading
import time
from importlib.metadata import EntryPoint

import pytest

from quire.errors import ConfigError
from quire.peer import transport as transport_module
from quire.peer.address import join_address, split_address, with_host
from quire.peer.errors import PeerError, ReadCancelled
from quire.peer.tcp import TcpTransport
from quire.peer.transport import open_transport
from unit.peer.rig import WAIT_S, raw_socket


@pytest.fixture
def line():
    """Both ends of a connection."""
    listener = TcpTransport().listen("tcp://127.0.0.1:0")
    near = TcpTransport().dial(listener.address, time.monotonic() + WAIT_S)
    far = listener.accept()
    for end in (near, far):
        end.set_deadline(time.monotonic() + WAIT_S)
    yield near, far
    near.close()
    far.close()
    listener.close()


def test_tcp_is_there_and_others_come_from_plug_ins(monkeypatch):
    assert isinstance(open_transport("tcp://h:1"), TcpTransport)
    entry = EntryPoint("other", "quire.peer.tcp:TcpTransport", transport_module.GROUP)
    monkeypatch.setattr(transport_module, "entry_points", lambda group: [entry])
    assert isinstance(open_transport("other://h:1"), TcpTransport)
    with pytest.raises(ConfigError, match=r"unknown transport 'x'.* known .* are other, tcp"):
        open_transport("x://h:1")


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:1", "tcp://host", "tcp://:1", "tcp://h:x", "tcp://h:99999", "tcp://h:1/a"],
)
def test_what_is_no_address_is_refused_with_the_form_it_should_have(text):
    with pytest.raises(ConfigError, match="tcp://host:port"):
        split_address(text)


def test_addresses_of_both_kinds_and_open_hosts():
    assert split_address("tcp://[::1]:80") == ("tcp", "::1", 80)
    assert join_address("tcp", "::1", 80) == "tcp://[::1]:80"
    assert with_host("tcp://0.0.0.0:80", "10.0.0.7") == "tcp://10.0.0.7:80"
    assert with_host("tcp://[::]:80", "fe80::1") == "tcp://[fe80::1]:80"
    assert with_host("tcp://node-3:80", "10.0.0.7") == "tcp://node-3:80"


def test_a_port_in_use_is_named():
    listener = TcpTransport().listen("tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match=rf"cannot listen on {listener.address}.*peer_port"):
        TcpTransport().listen(listener.address)
    listener.close()
    assert listener.accept() is None


def test_many_views_arrive_in_order(line):
    near, far = line
    data = bytes(range(256)) * 40_000  # more than the buffers hold
    views = [memoryview(data[i : i + 7001]) for i in range(0, len(data), 7001)]
    sender = threading.Thread(target=near.send_views, args=(views,))
    sender.start()
    into = bytearray(len(data))
    far.recv_into_views([memoryview(into)[: 1 << 20], memoryview(into)[1 << 20 :]])
    sender.join()
    assert into == data


def test_a_deadline_holds_even_if_bytes_trickle(line):
    near, far = line
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.01):
            near.send_views([memoryview(b"x")])

    sender = threading.Thread(target=trickle)
    sender.start()
    far.set_deadline(time.monotonic() + 0.2)
    with pytest.raises(TimeoutError):
        far.recv_into_views([memoryview(bytearray(1 << 20))])
    stop.set()
    sender.join()


def test_a_reader_who_does_not_read_times_the_sender_out(line):
    near, _ = line
    near.set_deadline(time.monotonic() + 0.2)
    with pytest.raises(TimeoutError):
        near.send_views([memoryview(bytes(64 << 20))])


def test_waiting_can_be_cancelled_interrupted_or_ended_by_the_other_side(line):
    near, far = line
    far.set_deadline(time.monotonic() + WAIT_S, lambda: True)
    with pytest.raises(ReadCancelled):
        far.recv_frame(10)
    far.set_deadline(time.monotonic() + WAIT_S)
    threading.Timer(0.05, near.interrupt).start()
    with pytest.raises(EOFError):
        far.recv_frame(10)


def test_a_frame_longer_than_allowed_is_not_read(line):
    near, far = line
    near.send_frame(b"x" * 11)
    with pytest.raises(PeerError):
        far.recv_frame(10)


def test_an_unused_connection_knows_when_it_is_of_no_use(line):
    near, far = line
    assert not near.is_stale()
    far.send_frame(b"out of turn")
    deadline = time.monotonic() + WAIT_S
    while not near.is_stale():
        assert time.monotonic() < deadline


def test_nobody_there_is_an_error_at_once():
    listener = TcpTransport().listen("tcp://127.0.0.1:0")
    listener.close()
    with pytest.raises(OSError):
        TcpTransport().dial(listener.address, time.monotonic() + WAIT_S)
    with pytest.raises(OSError):
        raw_socket(listener.address)
