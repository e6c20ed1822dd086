from __future__ import annotations

import errno
import os

import pytest

from quire.store.file.aio import RING_SLOTS, open_ring


@pytest.fixture
def ring():
    ring = open_ring()
    if ring is None:
        pytest.skip("no asynchronous I/O on this machine")
    yield ring
    ring.close()


@pytest.fixture
def fds(tmp_path):
    opened = [os.open(tmp_path / str(i), os.O_RDWR | os.O_CREAT) for i in range(RING_SLOTS)]
    yield opened
    for fd in opened:
        os.close(fd)


def blocks(byte):
    return [memoryview(bytearray([byte]) * 4096), memoryview(bytearray([byte + 100]) * 8192)]


def test_what_is_written_is_read(ring, fds):
    assert ring.write(fds, [blocks(i) for i in range(RING_SLOTS)]) == [12288] * RING_SLOTS
    into = [blocks(50) for _ in fds]
    assert ring.read(fds, into) == [12288] * RING_SLOTS
    assert into == [blocks(i) for i in range(RING_SLOTS)]


def test_ring_is_used_again_and_again(ring, fds):
    for i in range(20):
        assert ring.write(fds[:3], [blocks(i)] * 3) == [12288] * 3
    into = blocks(99)
    assert ring.read(fds[:1], [into]) == [12288]
    assert into == blocks(19)


def test_short_file_says_how_much_came(ring, fds):
    os.ftruncate(fds[1], 5000)
    assert ring.read(fds[:2], [blocks(0), blocks(0)]) == [0, 5000]


def test_one_bad_transfer_leaves_the_others_alone(ring, fds):
    bad = os.open("/dev/null", os.O_WRONLY)
    os.close(bad)
    results = ring.write([fds[0], bad, fds[1]], [blocks(1)] * 3)
    assert results == [12288, -errno.EBADF, 12288]


def test_no_transfer_is_fine(ring):
    assert ring.read([], []) == []
