"""Peers that die, stall, lie or are strangers: a status per page, no hang, and service goes on."""

import threading
import time
from dataclasses import replace

import pytest

from quire.memory.host import HostPool
from quire.peer import protocol
from quire.peer.region import Region
from quire.peer.server import PageServer, ServerLimits
from quire.types import PageStatus, page_ids
from unit.peer.rig import (
    EPOCH,
    GRANT,
    LAYOUT,
    NUM_PAGES,
    SECRET,
    TICKETS,
    WAIT_S,
    Impostor,
    Pair,
    answer,
    ask,
    bother,
    chosen,
    connect,
    dial_in,
    filled,
    identity_of,
    nixl_for,
    pages_of,
    raw_socket,
    rubbish,
    source,
    transport,
    wait_until,
)

__all__ = ["transport"]
pytestmark = pytest.mark.usefixtures("transport")

OK, FAILED, TIMEOUT = PageStatus.OK, PageStatus.FAILED, PageStatus.TIMEOUT
ALL_OK = [OK] * NUM_PAGES
PAGE = bytes(range(256)) * (LAYOUT.page_bytes // 256)


def good_answer(count, page=PAGE):
    sums = protocol.checksum(memoryview(page)) * count
    return protocol.encode(protocol.ReadAnswer(bytes(count), len(page), sums))


def read_from(behave, *, pages=4, timeout_s=WAIT_S, cancelled=lambda: False, **limits):
    """Statuses and errors of a read from a page server that behaves so."""
    impostor = Impostor(behave)
    errors = []
    client = connect(on_error=errors.append, streams=1, **limits)
    region = Region(HostPool(LAYOUT, pages), 0, 2)
    found = client.read(
        source((impostor.address, 0, 2)),
        region,
        range(pages),
        timeout_s=timeout_s,
        cancelled=cancelled,
    )
    client.close()
    impostor.close()
    return found, errors, region.pool


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"secret": "wrong"}, "the peer refused: the secrets differ"),
        ({"identity": identity_of(model="other")}, "the peer's model weights are m and ours"),
        (
            {"identity": identity_of(replace(LAYOUT, page_size=8))},
            "the peer's page size is 4 and ours",
        ),
    ],
)
def test_who_is_refused_gets_no_page_and_knows_why(options, sentence):
    with Pair() as pair:
        errors = []
        stranger = connect(on_error=errors.append, **options)
        found = stranger.read(pair.source(), pair.region, range(3), timeout_s=WAIT_S)
        assert found == [FAILED] * 3
        assert sentence in str(errors[0])
        stranger.close()
        assert pair.server.counters()["peer_sent_bytes"] == 0
        assert pair.read() == ALL_OK


def test_after_a_refusal_an_address_is_left_alone_for_a_while():
    with Pair() as pair:
        errors = []
        stranger = connect(secret="wrong", pause_s=60.0, on_error=errors.append, streams=1)
        for _ in range(2):
            stranger.read(pair.source(), pair.region, [0], timeout_s=WAIT_S)
        assert "secrets differ" in str(errors[0])
        assert str(errors[1]).startswith("not tried again yet: the peer refused")
        stranger.close()


# ---- strangers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_rubbish_on_the_port_changes_nothing(seed):
    with Pair() as pair:
        bother(pair.server.address, seed)
        assert pair.read() == ALL_OK
        assert pages_of(pair.own) == pages_of(pair.held)
        wait_until(lambda: pair.server.num_connections <= 2)


def test_rubbish_after_the_handshake_ends_that_connection_only():
    with Pair() as pair:
        for data in rubbish(5):
            connection = dial_in(pair.server.address)
            connection.send_views([memoryview(data)])
            connection.close()
        assert pair.read() == ALL_OK
        wait_until(lambda: pair.server.num_connections <= 2)


def test_those_who_say_nothing_keep_nobody_out():
    """As many as may wait to shake hands do, and say nothing: the oldest of them goes."""
    with Pair(server={"limits": ServerLimits(max_strangers=3)}) as pair:
        silent = []
        for number in range(3):
            silent.append(raw_socket(pair.server.address))
            wait_until(lambda number=number: pair.server.num_connections == number + 1)
        assert pair.read() == ALL_OK
        assert silent[0].recv(1) == b""
        for sock in silent:
            sock.close()


def test_one_reader_more_than_allowed_takes_the_place_of_one_that_is_idle():
    """The ninth rank of decode finds a connection too."""
    with Pair(server={"limits": ServerLimits(max_connections=2)}) as pair:
        readers = []
        for _ in range(4):
            readers.append(reader := dial_in(pair.server.address))
            ask(reader, count=1)
            assert answer(reader)[0].statuses == bytes([OK])
        with pytest.raises((EOFError, OSError)):
            readers[0].recv_frame(100)
        wait_until(lambda: pair.server.num_connections == 2)
        for reader in readers:
            reader.close()


def test_closing_does_not_wait_for_strangers():
    pair = Pair()
    with raw_socket(pair.server.address) as silent:
        wait_until(lambda: pair.server.num_connections == 1)
        pair.client.close()
        assert pair.server.close()
        assert silent.recv(1) == b""


# ---- peers that fail ----------------------------------------------------------------------------


def test_nobody_there():
    with Pair() as pair:
        pair.server.close()
        assert pair.read() == [FAILED] * NUM_PAGES
        assert isinstance(pair.errors[0], OSError)


def test_a_peer_that_dies_in_the_middle_of_a_page():
    def die(connection, read):
        connection.send_frame(good_answer(read.count))
        connection.send_views([memoryview(PAGE), memoryview(PAGE[:10])])
        return False

    found, _, _ = read_from(die)
    assert found == [FAILED] * 4


def test_pieces_that_came_before_the_peer_died_are_kept():
    def die_at_the_third(connection, read):
        if read.start >= 2:
            return False
        connection.send_frame(good_answer(read.count))
        connection.send_views([memoryview(PAGE)] * read.count)
        return True

    found, _, pool = read_from(
        die_at_the_third, min_piece_bytes=1, piece_bytes=LAYOUT.page_bytes, ahead=1
    )
    assert found == [OK, OK, FAILED, FAILED]
    assert pages_of(pool, [0, 1]) == [PAGE, PAGE]


def test_a_peer_that_stalls_costs_its_deadline():
    stop = threading.Event()

    def stall(connection, read):
        connection.send_frame(good_answer(read.count))
        return stop.wait(WAIT_S) and False

    found, _, _ = read_from(stall, timeout_s=0.3)
    stop.set()
    assert found == [TIMEOUT] * 4


def test_a_read_from_a_peer_that_stalls_can_be_cancelled():
    stop, began = threading.Event(), threading.Event()

    def stall(connection, read):
        began.set()
        return stop.wait(WAIT_S) and False

    found, errors, _ = read_from(stall, cancelled=began.is_set)
    stop.set()
    assert found == [PageStatus.CANCELLED] * 4
    assert errors == []


def test_bytes_that_do_not_fit_their_checksum_are_corrupt_and_the_rest_is_not():
    def flip(connection, read):
        connection.send_frame(good_answer(read.count))
        wrong = bytearray(PAGE)
        wrong[100] ^= 1
        pages = [PAGE] * read.count
        pages[1] = bytes(wrong)
        connection.send_views([memoryview(page) for page in pages])
        return True

    found, _, _ = read_from(flip)
    assert found == [OK, PageStatus.CORRUPT, OK, OK]


@pytest.mark.parametrize(
    "lie",
    [
        protocol.ReadAnswer(bytes(3), LAYOUT.page_bytes, bytes(24)),
        protocol.ReadAnswer(bytes(4), LAYOUT.page_bytes - 1, bytes(32)),
        protocol.ReadAnswer(bytes(4), LAYOUT.page_bytes, bytes(31)),
        protocol.ReadAnswer(b"\0\0\0\x63", LAYOUT.page_bytes, bytes(24)),
        protocol.ReadAnswer(b"", 0, b""),
    ],
)
def test_an_answer_to_something_else_is_no_answer(lie):
    def answer(connection, read):
        connection.send_frame(protocol.encode(lie))
        connection.send_views([memoryview(PAGE)] * 4)
        return True

    found, errors, _ = read_from(answer)
    assert found == [FAILED] * 4
    assert "not to what was asked" in str(errors[0])


def test_an_answer_that_is_rubbish_or_too_long_is_no_answer():
    for data in (b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1", b"\xff\xff\xff\xff"):

        def answer(connection, read, data=data):
            connection.send_views([memoryview(data)])
            return True

        assert read_from(answer)[0] == [FAILED] * 4


def test_a_peer_that_was_started_again_is_used_again():
    with Pair(streams=1) as pair:
        assert pair.read() == ALL_OK
        address = pair.server.address
        assert pair.server.close()
        assert pair.read() == [FAILED] * NUM_PAGES
        pair.server = PageServer(
            address,
            identity=identity_of(),
            secret=SECRET,
            epoch="life-2",
            regions=[Region(filled(seed=1), 0, 2)],
            tickets=TICKETS,
            nixl=nixl_for(chosen.kind, is_server=True),
        )
        pair.server.grant(GRANT, "full", page_ids(range(NUM_PAGES)))
        assert pair.read(epoch=EPOCH) == [PageStatus.MISS] * NUM_PAGES
        assert pair.read(epoch="life-2") == ALL_OK


def test_an_address_that_is_none_fails_its_pages():
    with Pair() as pair:
        for address in ("rubbish", "carrier://pigeon:1", "tcp://256.256.256.256:1"):
            where = source((address, 0, 2))
            assert pair.client.read(where, pair.region, [0, 1], timeout_s=5.0) == [FAILED] * 2


def test_closing_ends_reads_that_wait():
    stop, began = threading.Event(), threading.Event()

    def stall(connection, read):
        began.set()
        return stop.wait(WAIT_S) and False

    impostor = Impostor(stall)
    client = connect()
    found = []
    region = Region(HostPool(LAYOUT, 4), 0, 2)

    def read():
        found.extend(
            client.read(source((impostor.address, 0, 2)), region, [0], timeout_s=10 * WAIT_S)
        )

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(WAIT_S)
    client.close()
    thread.join(WAIT_S)
    assert found == [PageStatus.CANCELLED]
    stop.set()
    impostor.close()


def test_a_peer_that_is_slow_is_not_late_while_pages_come():
    """All of them take longer than any may: the wait is for the next one."""
    num_pages, page_s = 20, 0.15
    held = filled(num_pages=num_pages)
    came = []

    def trickle(connection, read):
        views = [
            Region(held, 0, 2).page(page) for page in range(read.start, read.start + read.count)
        ]
        sums = b"".join(protocol.checksum(view) for view in views)
        answer = protocol.ReadAnswer(bytes(read.count), views[0].nbytes, sums)
        connection.send_frame(protocol.encode(answer))
        for view in views:
            time.sleep(page_s)
            connection.set_deadline(time.monotonic() + WAIT_S)
            connection.send_views([view])
        return True

    impostor = Impostor(trickle)
    client = connect(streams=1)
    region = Region(HostPool(LAYOUT, num_pages), 0, 2)
    statuses = client.read(
        source((impostor.address, 0, 2)),
        region,
        range(num_pages),
        timeout_s=num_pages * page_s * 0.8,
        came=lambda first, statuses: came.append((first, len(statuses))),
    )
    assert statuses == [OK] * num_pages
    assert sum(count for _, count in came) == num_pages
    client.close()
    impostor.close()
