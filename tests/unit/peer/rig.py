"""Engines' page servers and pools over real sockets, and peers that do as they are told."""

import contextlib
import functools
import socket
import threading
import time

import numpy as np
import pytest

from quire.engine.parallel import share
from quire.memory.host import HostPool
from quire.memory.page_layout import InnerLayout, PageLayout
from quire.messages import PeerPart, PeerSource
from quire.peer import protocol
from quire.peer.client import ClientLimits, PageClient
from quire.peer.connection_pool import PoolLimits
from quire.peer.greet import shake_hands
from quire.peer.handshake import Side, page_handshake
from quire.peer.identity import make_identity
from quire.peer.kinds import TransportKind
from quire.peer.nixl import NixlAgent
from quire.peer.region import Region
from quire.peer.server import PageServer
from quire.peer.tcp import TcpTransport
from quire.peer.tickets import Tickets
from quire.types import OperationId, page_ids

SECRET, EPOCH = "quiet words", "life-1"
TICKET_KEY = b"between leader and ranks"
TICKETS = Tickets(TICKET_KEY)
GRANT = OperationId(7)
WAIT_S = 120.0
"""Only how long a broken test takes to fail."""
LAYOUT = PageLayout("full", 3, 2, 8, "float32", 4)
NUM_PAGES = 8


class Chosen:
    """By what tests read pages: AUTO is shared memory here, for all is on one machine."""

    kind = TransportKind.TCP


chosen = Chosen()


@pytest.fixture(params=[TransportKind.AUTO, TransportKind.TCP, TransportKind.NIXL])
def transport(request, monkeypatch):
    if request.param is TransportKind.NIXL:
        needs_nixl()
    monkeypatch.setattr(chosen, "kind", request.param)
    return request.param


def needs_nixl():
    pytest.importorskip("nixl", reason="install quire[nixl]")


@functools.cache
def nixl_reader():
    """For all clients: it takes a while to start."""
    return NixlAgent()


def nixl_for(kind, *, is_server):
    """A page server has an agent of its own, as in a process."""
    if kind is not TransportKind.NIXL:
        return None
    return NixlAgent() if is_server else nixl_reader()


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def identity_of(layout=LAYOUT, *, model="m", num_heads=None):
    return make_identity(model, [layout], {layout.component: num_heads or layout.num_kv_heads})


def model_pages(layout, num_heads, num_pages=NUM_PAGES, seed=0):
    """Bytes of all heads: [pages, layers × planes, page_size, heads, bytes per row]."""
    row_bytes = layout.chunk_bytes // layout.page_size // layout.num_kv_heads
    shape = (
        num_pages,
        layout.num_layers * layout.num_planes,
        layout.page_size,
        num_heads,
        row_bytes,
    )
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def cut(layout, whole, first, last):
    """What a rank with these heads holds, page by page."""
    mine = whole[:, :, :, first:last]
    if layout.inner is InnerLayout.HND:
        mine = mine.transpose(0, 1, 3, 2, 4)
    return [page.tobytes() for page in mine]


def pages_of(pool, pages=range(NUM_PAGES)):
    return [bytes(pool.page_view(page)[: pool.layout.page_bytes]) for page in pages]


def filled(layout=LAYOUT, num_pages=NUM_PAGES, seed=0):
    pool = HostPool(layout, num_pages, is_shared=True)
    fill(pool, cut(layout, model_pages(layout, layout.num_kv_heads, num_pages, seed), 0, None))
    return pool


def fill(pool, contents):
    for page, content in enumerate(contents):
        pool.page_view(page)[: len(content)] = content


def with_heads(layout, num_heads):
    return PageLayout(
        layout.component,
        layout.num_layers,
        num_heads,
        layout.head_dim,
        layout.dtype,
        layout.page_size,
        layout.inner,
        layout.num_planes,
    )


def ranks(layout, total_heads, num_ranks, whole=None):
    """A region per rank, filled when `whole` is given."""
    regions = []
    for rank in range(num_ranks):
        first, last = share(total_heads, rank, num_ranks)
        pool = HostPool(with_heads(layout, last - first), NUM_PAGES, is_shared=True)
        if whole is not None:
            fill(pool, cut(layout, whole, first, last))
        regions.append(Region(pool, first, last))
    return regions


def serve(region, identity=None, *, address="tcp://127.0.0.1:0", **options):
    kind = options.pop("kind", chosen.kind)
    return PageServer(
        address,
        identity=identity or identity_of(region.pool.layout),
        secret=options.pop("secret", SECRET),
        epoch=EPOCH,
        regions=[region],
        tickets=TICKETS,
        kind=kind,
        nixl=options.pop("nixl", None) or nixl_for(kind, is_server=True),
        **options,
    )


def connect(identity=None, *, secret=SECRET, pause_s=0.0, on_error=lambda error: None, **limits):
    kind = limits.pop("kind", chosen.kind)
    return PageClient(
        identity or identity_of(),
        secret,
        kind=kind,
        nixl=nixl_for(kind, is_server=False),
        limits=ClientLimits(**limits),
        pool_limits=PoolLimits(pause_s=pause_s),
        on_error=on_error,
    )


def source(*parts, epoch=EPOCH, grant=GRANT, first=0):
    return PeerSource(epoch, grant, first, [PeerPart(*part) for part in parts], TICKETS.of(grant))


class Pair:
    """A server over filled pages, all granted, and a client of the same layout."""

    def __init__(self, layout=LAYOUT, *, num_pages=NUM_PAGES, server=None, **limits):
        heads = layout.num_kv_heads
        self.held = filled(layout, num_pages)
        self.own = HostPool(layout, num_pages)
        self.server = serve(Region(self.held, 0, heads), **(server or {}))
        self.server.grant(GRANT, layout.component, page_ids(range(num_pages)))
        self.errors = []
        self.client = connect(identity_of(layout), on_error=self.errors.append, **limits)
        self.region = Region(self.own, 0, heads)

    def source(self, **options):
        return source((self.server.address, 0, self.region.last_head), **options)

    def read(self, pages=None, *, timeout_s=WAIT_S, offset=0, cancelled=lambda: False, **options):
        pages = range(self.own.num_pages) if pages is None else pages
        return self.client.read(
            self.source(**options),
            self.region,
            pages,
            offset=offset,
            timeout_s=timeout_s,
            cancelled=cancelled,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        assert self.server.close()
        received = self.client.counters()
        way = "shm" if chosen.kind is TransportKind.AUTO else chosen.kind.value
        others = {"tcp", "shm", "nixl"} - {way}
        assert not any(received.get(f"peer_received_bytes_{other}") for other in others)


class Impostor:
    """A page server that knows the secret, and then does what `behave(connection, read)` does."""

    def __init__(self, behave, *, identity=None, secret=SECRET):
        if chosen.kind is TransportKind.NIXL:
            pytest.skip("an impostor pushes pages")
        self._behave = behave
        self._identity = identity or identity_of()
        self._secret = secret
        self._listener = TcpTransport().listen("tcp://127.0.0.1:0")
        self.address = self._listener.address
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while (connection := self._listener.accept()) is not None:
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection):
        connection.set_deadline(time.monotonic() + WAIT_S)
        with contextlib.suppress(OSError, EOFError):
            handshake = page_handshake(Side.LISTENER, self._secret, self._identity)
            shake_hands(connection, handshake, dials=False)
            while True:
                read = protocol.decode_read(connection.recv_frame(1 << 16))
                if not self._behave(connection, read):
                    break
        connection.close()

    def close(self):
        self._listener.close()


def dial_in(address, identity=None, *, secret=SECRET, receive_buffer=None):
    """A reader by hand: a connection that is through the handshake."""
    connection = TcpTransport().dial(address, time.monotonic() + WAIT_S)
    if receive_buffer is not None:
        connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.set_deadline(time.monotonic() + WAIT_S)
    handshake = page_handshake(Side.DIALER, secret, identity or identity_of())
    shake_hands(connection, handshake, dials=True)
    return connection


def ask(connection, *, count, start=0, heads=(0, 2), component="full"):
    read = protocol.Read(
        EPOCH, GRANT, component, start, count, *heads, wait_s=0.0, ticket=TICKETS.of(GRANT)
    )
    connection.send_frame(protocol.encode(read))


def answer(connection):
    """The answer, and the bytes after it."""
    found = protocol.decode_answer(connection.recv_frame(1 << 16))
    data = bytearray(found.page_bytes * found.statuses.count(0))
    connection.recv_into_views([memoryview(data)])
    return found, bytes(data)


def raw_socket(address):
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def rubbish(seed=0, count=20):
    """What a port scanner, a browser or a broken peer might send."""
    rng = np.random.default_rng(seed)
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\xff" * 64
    yield b"\x00\x00\x00\x00"
    yield b"\x05\x00\x00\x00\xc1\xc1\xc1\xc1\xc1"
    yield b"\x10\x00\x00\x00\x81"  # half a hello
    for _ in range(count):
        yield rng.bytes(int(rng.integers(1, 200)))


def bother(address, seed=0):
    """Send rubbish to a port, over connections that stay open until all is sent."""
    with contextlib.ExitStack() as stack:
        for data in rubbish(seed):
            sock = stack.enter_context(raw_socket(address))
            with contextlib.suppress(OSError):
                sock.sendall(data)
