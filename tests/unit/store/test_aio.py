from __future__ import annotations

import ctypes
import errno
import os

import pytest

from quire.store.base import MAX_OBJECTS
from quire.store.file.aio import open_ring
from quire.types import PageStatus


@pytest.fixture
def ring():
    ring = open_ring()
    if ring is None:
        pytest.skip("no asynchronous I/O on this machine")
    yield ring
    ring.close()


@pytest.fixture
def fds(tmp_path):
    opened = [os.open(tmp_path / str(i), os.O_RDWR | os.O_CREAT) for i in range(MAX_OBJECTS)]
    yield opened
    for fd in opened:
        os.close(fd)


def blocks(byte):
    return [memoryview(bytearray([byte]) * 4096), memoryview(bytearray([byte + 100]) * 8192)]


def test_what_is_written_is_read(ring, fds):
    assert ring.write(fds, [blocks(i) for i in range(MAX_OBJECTS)]) == [12288] * MAX_OBJECTS
    into = [blocks(50) for _ in fds]
    assert ring.read(fds, into) == [12288] * MAX_OBJECTS
    assert into == [blocks(i) for i in range(MAX_OBJECTS)]


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


class FailingKernel:
    """The C library, with the calls after io_submit as each test wants them."""

    def __init__(self, ring, *, destroy_fails=False):
        self.libc, self.calls = ring._libc, []
        self.wait_no, self.destroy_no = ring._wait_no, ring._destroy_no
        self.destroy_fails = destroy_fails
        ring._libc = self

    def syscall(self, number, *args):
        self.calls.append(number)
        if number == self.wait_no or (number == self.destroy_no and self.destroy_fails):
            ctypes.set_errno(errno.EINVAL)
            return -1
        return self.libc.syscall(number, *args)


def test_a_failed_wait_returns_only_when_the_kernel_is_done_with_the_buffers(ring, fds):
    ring.write(fds[:2], [blocks(1)] * 2)
    kernel = FailingKernel(ring)
    into = [blocks(9), blocks(9)]
    with pytest.raises(OSError, match="io_getevents"):
        ring.read(fds[:2], into)
    assert kernel.calls[-1] == kernel.destroy_no  # which waits for them
    assert into == [blocks(1)] * 2


def test_buffers_the_kernel_may_still_write_to_are_never_given_back(ring, fds, monkeypatch):
    class Waits(BaseException):
        pass

    def wait_for_ever():
        raise Waits

    monkeypatch.setattr("quire.store.file.aio._wait_for_ever", wait_for_ever)
    kernel = FailingKernel(ring, destroy_fails=True)
    with pytest.raises(Waits):
        ring.write(fds[:2], [blocks(1)] * 2)
    kernel.destroy_fails = False


def test_pages_of_a_failed_wait_are_not_reported_before_the_kernel_is_done_c17(
    client, file_store, pages
):
    """Through the store: the pages come back as FAILED, and the next call works."""
    files = file_store()
    store = client(files)
    pages.put(store, *range(4))
    if not files._io._rings:
        pytest.skip("no asynchronous I/O on this machine")
    kernel = FailingKernel(files._io._rings[0])
    assert pages.get(store, *range(4)) == [PageStatus.FAILED] * 4
    assert kernel.calls[-1] == kernel.destroy_no
    assert pages.get(store, *range(4)) == [PageStatus.OK] * 4
