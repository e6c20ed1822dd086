"""Pages from one engine's host memory to another's: the right bytes, or a status, never others."""

import threading
from dataclasses import replace

import pytest

from quire.memory.page_layout import InnerLayout, PageLayout
from quire.messages import PeerPart
from quire.peer import protocol
from quire.peer.client import covering
from quire.peer.server import ServerLimits
from quire.types import PageStatus, page_ids
from unit.peer.rig import (
    GRANT,
    LAYOUT,
    NUM_PAGES,
    WAIT_S,
    Pair,
    answer,
    ask,
    connect,
    cut,
    dial_in,
    identity_of,
    model_pages,
    pages_of,
    ranks,
    serve,
    source,
    transport,
    wait_until,
)

__all__ = ["transport"]
pytestmark = pytest.mark.usefixtures("transport")

OK, MISS, FAILED = PageStatus.OK, PageStatus.MISS, PageStatus.FAILED
ALL_OK = [OK] * NUM_PAGES

LAYOUTS = [
    LAYOUT,
    replace(LAYOUT, inner=InnerLayout.HND),
    PageLayout("window", 5, 2, 24, "bfloat16", 4),
    PageLayout("full", 2, 2, 3, "uint8", 5, InnerLayout.HND, num_planes=1),
]


def exchange(layout, total_heads, num_holders, num_askers):
    """Every asker's rank reads all pages: compare with what it should hold."""
    whole = model_pages(layout, total_heads)
    identity = identity_of(layout, num_heads=total_heads)
    holders = ranks(layout, total_heads, num_holders, whole)
    askers = ranks(layout, total_heads, num_askers)
    servers = [serve(region, identity) for region in holders]
    order = [5, 2, 7, 0, 1, 3, 6, 4]  # page numbers of the two engines have nothing in common
    for server in servers:
        server.grant(GRANT, layout.component, page_ids(order))
    parts = [
        (server.address, region.first_head, region.last_head)
        for server, region in zip(servers, holders, strict=True)
    ]
    client = connect(identity)
    for region in askers:
        assert client.read(source(*parts), region, range(NUM_PAGES), timeout_s=WAIT_S) == ALL_OK
        expected = cut(layout, whole, region.first_head, region.last_head)
        assert pages_of(region.pool) == [expected[page] for page in order]
    client.close()
    assert all(server.close() for server in servers)
    sent = sum(server.counters()["peer_sent_bytes"] for server in servers)
    page_bytes = sum(region.pool.layout.page_bytes for region in askers)
    assert sent == client.counters()["peer_received_bytes"] == NUM_PAGES * page_bytes
    assert client.counters()["peer_received_pages"] == NUM_PAGES * num_askers


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("num_holders", "num_askers"), [(1, 1), (2, 2), (1, 2), (2, 1), (2, 3), (4, 3)]
)
def test_the_bytes_are_right_for_any_share_of_the_heads(layout, num_holders, num_askers):
    exchange(layout, 6, num_holders, num_askers)


def test_heads_that_do_not_divide_evenly():
    exchange(LAYOUT, 3, 2, 1)
    exchange(LAYOUT, 3, 1, 2)


def test_states_have_one_head_whatever_the_heads_of_the_rest():
    layout = PageLayout("recurrent", 3, 1, 1237, "uint8", 1, num_planes=1)
    with Pair(layout) as pair:
        # The peer's rank is known by its key-value heads.
        everything = source((pair.server.address, 0, 8))
        found = pair.client.read(everything, pair.region, range(NUM_PAGES), timeout_s=WAIT_S)
        assert found == ALL_OK
        assert pages_of(pair.own) == pages_of(pair.held)


def test_some_pages_of_a_grant_into_other_places():
    with Pair() as pair:
        assert pair.read([6, 1], first=2, offset=1) == [OK, OK]
        assert pages_of(pair.own, [6, 1]) == pages_of(pair.held, [3, 4])


def test_the_same_read_twice_uses_the_same_connections():
    with Pair(streams=2, min_piece_bytes=1) as pair:
        assert pair.read() == ALL_OK
        connected = pair.server.num_connections
        assert pair.read() == ALL_OK
        assert pair.server.num_connections == connected <= 2


@pytest.mark.parametrize("streams", [1, 3])
def test_reads_are_cut_into_pieces_and_put_together_again(streams):
    with Pair(num_pages=100, streams=streams, min_piece_bytes=1, piece_bytes=5000) as pair:
        assert pair.read() == [OK] * 100
        assert pages_of(pair.own, range(100)) == pages_of(pair.held, range(100))


def test_many_threads_read_at_once():
    with Pair(num_pages=64, streams=2, min_piece_bytes=1, piece_bytes=4096) as pair:
        found = []
        threads = [
            threading.Thread(
                target=lambda n: found.append(pair.read(range(n * 8, n * 8 + 8), first=n * 8)),
                args=(number,),
            )
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [ALL_OK] * 8
        assert pages_of(pair.own, range(64)) == pages_of(pair.held, range(64))
        assert pair.server.num_connections <= 8


# ---- what is not granted ------------------------------------------------------------------------


def test_beyond_the_grant_there_is_nothing():
    with Pair() as pair:
        before = pages_of(pair.own)
        assert pair.read([0, 1, 2], first=6) == [OK, OK, MISS]
        for first in (8, 1 << 40):
            assert pair.read([3], first=first) == [MISS]
        assert pair.read([3], first=0, offset=-1) == [MISS]
        assert pages_of(pair.own)[2:] == before[2:]


def test_another_life_or_component_or_heads_get_a_status_and_no_byte():
    with Pair() as pair:
        assert pair.read([0], epoch="life-0") == [MISS]
        assert pair.read([0], grant=99, timeout_s=0.2)[0] in (MISS, PageStatus.TIMEOUT)
        connection = dial_in(pair.server.address)
        for options in ({"component": "window"}, {"heads": (0, 3)}, {"heads": (1, 1)}):
            ask(connection, count=2, **options)
            found, data = answer(connection)
            assert (found.statuses, data) == (bytes([FAILED, FAILED]), b"")
        connection.close()
        assert pair.server.counters()["peer_sent_pages"] == 0


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_a_count_that_makes_no_sense_ends_the_connection(count):
    with Pair() as pair:
        connection = dial_in(pair.server.address)
        ask(connection, count=count)
        with pytest.raises((EOFError, OSError)):
            answer(connection)
        connection.close()
        assert pair.read() == ALL_OK


def test_a_read_that_is_too_much_at_once_is_cut_short(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_READ_BYTES", 3 * LAYOUT.page_bytes)
    with Pair() as pair:
        connection = dial_in(pair.server.address)
        ask(connection, count=5)
        found, data = answer(connection)
        assert found.statuses == bytes([OK] * 3 + [PageStatus.REJECTED] * 2)
        assert data == b"".join(pages_of(pair.held)[:3])
        connection.close()


def test_ranks_that_lack_some_of_our_heads_cannot_serve_us():
    with Pair() as pair:
        part = source((pair.server.address, 0, 1))
        assert pair.client.read(part, pair.region, [0], timeout_s=WAIT_S) == [FAILED]
        assert "heads" in str(pair.errors[0])


def test_which_rank_is_asked_for_which_heads():
    parts = [PeerPart("b", 2, 4), PeerPart("a", 0, 2), PeerPart("c", 4, 6)]
    assert covering(parts, 1, 5) == [PeerPart("a", 1, 2), PeerPart("b", 2, 4), PeerPart("c", 4, 5)]
    assert covering(parts, 2, 4) == [PeerPart("b", 2, 4)]
    assert covering(parts, 4, 7) is None
    assert covering([], 0, 1) is None
    assert covering([parts[1], parts[2]], 0, 6) is None
    assert covering([PeerPart("a", 0, 4), PeerPart("b", 0, 4)], 0, 4) == [PeerPart("a", 0, 4)]


# ---- the life of a grant ------------------------------------------------------------------------


BIG = PageLayout("full", 2, 2, 1024, "float32", 64)
"""A page is two megabytes: a few do not fit any socket's buffers."""


def test_a_revoked_grant_is_free_only_when_its_last_reader_has_gone():
    with Pair(BIG, num_pages=8) as pair:
        connection = dial_in(pair.server.address, identity_of(BIG), receive_buffer=1 << 18)
        ask(connection, count=8)
        grant = pair.server._grants._open[GRANT, "full"]
        wait_until(lambda: grant.num_readers or not pair.server.num_connections)
        free = threading.Event()
        pair.server.revoke(GRANT, "full", free.set)
        assert pair.read([0]) == [MISS]
        assert not free.is_set()
        found, data = answer(connection)
        assert found.statuses == bytes(8)
        assert data == b"".join(pages_of(pair.held, range(8)))
        assert free.wait(WAIT_S)
        connection.close()


def test_a_reader_that_stalls_is_dropped_and_cannot_hold_a_grant():
    with Pair(BIG, num_pages=8, server={"limits": ServerLimits(send_timeout_s=0.3)}) as pair:
        connection = dial_in(pair.server.address, identity_of(BIG), receive_buffer=1 << 18)
        ask(connection, count=8)
        grant = pair.server._grants._open[GRANT, "full"]
        wait_until(lambda: grant.num_readers or not pair.server.num_connections)
        free = threading.Event()
        pair.server.revoke(GRANT, "full", free.set)
        assert free.wait(WAIT_S)
        wait_until(lambda: pair.server.num_connections == 0)
        connection.close()


def test_a_read_that_comes_before_its_grant_waits_for_it():
    with Pair() as pair:
        threading.Timer(0.1, pair.server.grant, (8, "full", page_ids([4]))).start()
        assert pair.read([0], grant=8) == [OK]
        assert pages_of(pair.own, [0]) == pages_of(pair.held, [4])


def test_regions_know_their_heads():
    region = ranks(LAYOUT, 4, 2)[1]
    assert region.holds(2, 3)
    assert not region.holds(1, 3)
    assert region.cut_bytes(2, 3) * 2 == region.pool.layout.page_bytes
    assert replace(region, first_head=0, last_head=2).is_whole(0, 2)
