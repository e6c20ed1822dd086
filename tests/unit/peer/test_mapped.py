"""Pages through memory shared on one machine: right or refused, whoever stalls, lies or dies."""

import contextlib
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from quire.errors import ConfigError
from quire.memory.host import HostPool
from quire.memory.shared import NotShareable, create_shared, map_shared
from quire.peer import connection_pool, protocol, unix
from quire.peer.greet import shake_hands
from quire.peer.handshake import Side, page_handshake
from quire.peer.kinds import TransportKind
from quire.peer.region import Region
from quire.peer.server import ServerLimits
from quire.peer.unix import dial_near, listen_near, near_address
from quire.types import PageStatus
from unit.peer import rig
from unit.peer.rig import (
    EPOCH,
    GRANT,
    LAYOUT,
    NUM_PAGES,
    SECRET,
    WAIT_S,
    Pair,
    connect,
    identity_of,
    pages_of,
    rubbish,
    source,
    wait_until,
)

OK, FAILED = PageStatus.OK, PageStatus.FAILED
ALL_OK = [OK] * NUM_PAGES


@pytest.fixture(autouse=True)
def near(monkeypatch):
    monkeypatch.setattr(rig.chosen, "kind", TransportKind.AUTO)


def near_of(pair):
    return near_address(SECRET, EPOCH, pair.server.address)


def mapped_here():
    """Memory of others, or lent to others, that this process has mapped, in bytes."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:q" in line]
    spans = [line.split()[0].split("-") for line in lines]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def test_a_reader_that_was_dropped_takes_nothing_for_good(monkeypatch):
    """It was stopped while it copied; meanwhile the pages became others."""
    dropped = threading.Event()
    copy = Region.copy_from

    def stopped(*args):
        copy(*args)
        assert dropped.wait(WAIT_S)

    with Pair(server={"limits": ServerLimits(send_timeout_s=0.2)}) as pair:
        monkeypatch.setattr(Region, "copy_from", stopped)
        found = []
        reader = threading.Thread(target=lambda: found.extend(pair.read()))
        reader.start()
        grant = pair.server._grants._open[GRANT, "full"]
        wait_until(lambda: grant.num_readers)
        pair.server.revoke(GRANT, "full", lambda: (pair.held.raw().fill_(9), dropped.set()))
        reader.join(WAIT_S)
        assert found == [FAILED] * NUM_PAGES


def test_a_read_can_be_cancelled_between_pages(monkeypatch):
    copied = []
    copy = Region.copy_from
    monkeypatch.setattr(Region, "copy_from", lambda *args: copied.append(copy(*args)))
    with Pair() as pair:
        found = pair.read(cancelled=lambda: len(copied) == 3)
        assert found == [PageStatus.CANCELLED] * NUM_PAGES
        assert len(copied) == 3
        wait_until(lambda: not pair.server._grants._open[GRANT, "full"].num_readers)
        copied.clear()
        assert pair.read(cancelled=lambda: False) == ALL_OK


def test_readers_cannot_write_and_owners_cannot_shrink():
    pool = HostPool(LAYOUT, 4, is_shared=True)
    with pytest.raises(OSError):
        mmap.mmap(pool.descriptor, mmap.PAGESIZE)
    with pytest.raises(OSError):
        os.ftruncate(pool.descriptor, mmap.PAGESIZE)
    memory = map_shared(pool.descriptor, pool.size_bytes)
    pool.page_view(1)[:3] = b"abc"
    assert memory[LAYOUT.page_stride_bytes :][:3] == b"abc"
    with pytest.raises(TypeError):
        memory[0] = 1
    descriptor = pool.descriptor
    pool.close()
    assert pool.descriptor is None
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_memory_that_could_shrink_or_is_too_small_is_not_mapped(tmp_path):
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 4096)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, 4096)
    sealed, memory = create_shared(4096)
    for descriptor, size_bytes in ((loose, 4096), (file, 4096), (sealed, 8192), (sealed, 0)):
        with pytest.raises(NotShareable):
            map_shared(descriptor, size_bytes)
    for descriptor in (loose, file, sealed):
        os.close(descriptor)
    memory.close()


# ---- who is refused -----------------------------------------------------------------------------


def test_strangers_get_no_memory():
    with Pair() as pair:
        for data in rubbish(5):
            connection = dial_near(near_of(pair), time.monotonic() + WAIT_S)
            connection.set_deadline(time.monotonic() + WAIT_S)
            connection.send_views([memoryview(data)])
            connection.close()
        wrong = dial_near(near_of(pair), time.monotonic() + WAIT_S)
        wrong.set_deadline(time.monotonic() + WAIT_S)
        handshake = page_handshake(Side.DIALER, "other words", identity_of(), is_local=True)
        with pytest.raises(Exception, match="secrets differ"):
            shake_hands(wrong, handshake, dials=True)
        with pytest.raises((EOFError, OSError)):
            wrong.recv_descriptors(1)
        wrong.close()
        assert pair.read() == ALL_OK


def test_another_user_is_refused_and_reads_over_tcp(monkeypatch):
    with Pair(kind=TransportKind.TCP) as pair:  # the reader's
        monkeypatch.setattr(unix.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PermissionError):
            dial_near(near_of(pair), time.monotonic() + WAIT_S)
        elsewhere = connect()
        found = elsewhere.read(pair.source(), pair.region, range(NUM_PAGES), timeout_s=WAIT_S)
        assert found == ALL_OK
        assert elsewhere.counters()["peer_received_bytes_tcp"] == NUM_PAGES * LAYOUT.page_bytes
        elsewhere.close()
        monkeypatch.undo()
        monkeypatch.setattr(rig.chosen, "kind", TransportKind.TCP)


def test_only_shared_memory_means_only_shared_memory():
    with Pair(server={"kind": TransportKind.TCP}, kind=TransportKind.SHM) as pair:
        assert pair.read() == [FAILED] * NUM_PAGES
        assert "does not share its memory with us" in str(pair.errors[0])


class NearImpostor:
    """A page server on this machine that knows the secret and lends as it likes."""

    def __init__(self, lent, descriptors, answer=None):
        self._lent, self._descriptors, self._answer = lent, descriptors, answer
        self._door = socket.create_server(("127.0.0.1", 0))  # only for its port
        self.address = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        self._listener = listen_near(near_address(SECRET, EPOCH, self.address))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        connection = self._listener.accept()
        connection.set_deadline(time.monotonic() + WAIT_S)
        with contextlib.suppress(OSError, EOFError):
            self._lend(connection)
        connection.close()

    def _lend(self, connection):
        handshake = page_handshake(Side.LISTENER, SECRET, identity_of(), is_local=True)
        shake_hands(connection, handshake, dials=False)
        connection.send_frame(msgspec.msgpack.encode(self._lent))
        connection.send_descriptors(self._descriptors)
        if self._answer is not None:
            connection.recv_frame(1 << 16)
            connection.send_frame(protocol.encode(self._answer))

    def close(self):
        self._listener.close()
        self._door.close()


STRIDE = LAYOUT.page_stride_bytes


@pytest.mark.parametrize(
    ("lent", "places"),
    [
        (["full", 4, STRIDE, 0, 2], [4]),
        (["full", 4, STRIDE, 0, 2], [-1]),
        (["full", 4, STRIDE, 0, 2], [1, 2]),
        (["full", 4, STRIDE, 0, 1], [0]),  # without some of the heads
        (["full", 4, STRIDE + 1, 0, 2], [0]),
        (["full", 4096, STRIDE, 0, 2], [0]),  # more than there is
        (["other", 4, STRIDE, 0, 2], [0]),
    ],
)
def test_a_peer_that_lies_about_its_memory_is_not_believed(lent, places):
    pool = HostPool(LAYOUT, 4, is_shared=True)
    data = b"".join(place.to_bytes(4, "little", signed=True) for place in places)
    answer = protocol.ReadAnswer(bytes(1), LAYOUT.page_bytes, b"", data)
    impostor = NearImpostor([[lent]], [pool.descriptor], answer)
    client = connect(kind=TransportKind.SHM)
    own = Region(HostPool(LAYOUT, 4), 0, 2)
    found = client.read(source((impostor.address, 0, 2)), own, [0], timeout_s=WAIT_S)
    assert found == [FAILED]
    assert not any(own.page(0))
    client.close()
    impostor.close()
    pool.close()


# ---- who dies -----------------------------------------------------------------------------------

SERVER = """
import sys, time
from unit.peer import rig
from quire.peer.kinds import TransportKind
rig.chosen.kind = TransportKind.AUTO
pair = rig.Pair()
print(pair.server.address, flush=True)
time.sleep(3600)
"""
READER = """
import sys, time
from quire.peer.region import Region
from unit.peer import rig
from quire.peer.kinds import TransportKind
Region.copy_from = lambda *_: (print("copying", flush=True), time.sleep(3600))
client = rig.connect(kind=TransportKind.SHM)
region = Region(rig.HostPool(rig.LAYOUT, rig.NUM_PAGES), 0, 2)
client.read(rig.source((sys.argv[1], 0, 2)), region, range(4), timeout_s=3600)
"""


def start(script, *args):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_page_server_that_is_killed_leaves_no_memory_behind(monkeypatch):
    monkeypatch.setattr(connection_pool, "_WATCH_S", 0.01)
    with start(SERVER) as server:
        address = server.stdout.readline().strip()
        client = connect(kind=TransportKind.SHM, pause_s=60.0)
        own = Region(HostPool(LAYOUT, NUM_PAGES), 0, 2)
        where = source((address, 0, 2))
        gc.collect()
        before = mapped_here()
        assert client.read(where, own, range(NUM_PAGES), timeout_s=WAIT_S) == ALL_OK
        assert pages_of(own.pool) == pages_of(rig.filled())
        gc.collect()
        assert mapped_here() > before
        server.kill()
        wait_until(lambda: mapped_here() <= before)
        assert client.read(where, own, range(NUM_PAGES), timeout_s=WAIT_S) == [FAILED] * NUM_PAGES
        client.close()


def test_a_reader_that_is_killed_lets_go_of_what_it_read():
    with Pair() as pair, start(READER, pair.server.address) as reader:
        assert reader.stdout.readline() == "copying\n"
        free = threading.Event()
        pair.server.revoke(GRANT, "full", free.set)
        assert not free.is_set()
        reader.kill()
        assert free.wait(WAIT_S)


def test_an_address_that_is_taken_leaves_no_socket_behind():
    address = near_address(SECRET, EPOCH, "tcp://127.0.0.1:1")
    listener = listen_near(address)
    try:
        # Warnings are errors here: one that was left open would be told of when it is collected.
        with pytest.raises(ConfigError, match="set peer_transport to tcp"):
            listen_near(address)
        gc.collect()
    finally:
        listener.close()
