"""Pushed: the bytes of pages follow the answer on its connection, a checksum for each."""

from __future__ import annotations

import time

import numpy as np

from quire.peer import protocol
from quire.peer.errors import PeerError
from quire.peer.protocol import Read, ReadAnswer
from quire.peer.region import Region
from quire.peer.transport import Connection
from quire.peer.ways.base import Granted, Wanted
from quire.peer.wire import framed
from quire.types import PageStatus

_NO_LIMIT = 1 << 30


class PushedOutlet:
    def open(self, connection: Connection) -> None:
        """Nothing need be known."""

    def give(self, connection: Connection, read: Read, granted: Granted) -> None:
        views = _views(granted.region, granted.pages, read, granted.page_bytes)
        sums = b"".join(protocol.checksum(view) for view in views)
        answer = ReadAnswer(granted.statuses, granted.page_bytes, sums)
        connection.send_views([memoryview(framed(protocol.encode(answer))), *views])

    def close(self) -> None:
        """Nothing is held."""


class PushedInlet:
    """Into the page itself when all its heads are asked of one page server, else into scratch
    memory, and put in place from there."""

    name = "tcp"
    max_ahead = _NO_LIMIT

    def take(self, connection: Connection, answer: ReadAnswer, wanted: Wanted) -> bytes:
        num_ok = answer.statuses.count(PageStatus.OK)
        if len(answer.checksums) != num_ok * protocol.CHECKSUM_BYTES:
            raise PeerError(protocol.NOT_TO_WHAT_WAS_ASKED)
        region, heads = wanted.region, (wanted.first_head, wanted.last_head)
        whole = region.is_whole(*heads)
        scratch = np.empty(0 if whole else wanted.page_bytes, dtype=np.uint8).data
        sums = memoryview(answer.checksums)
        statuses = bytearray(answer.statuses)
        for index, status in enumerate(answer.statuses):
            if status != PageStatus.OK:
                continue
            page = wanted.pages[index]
            view = region.page(page) if whole else scratch
            connection.recv_into_views([view])
            connection.set_deadline(time.monotonic() + wanted.timeout_s, wanted.cancelled)
            if protocol.checksum(view) != sums[: protocol.CHECKSUM_BYTES]:
                statuses[index] = PageStatus.CORRUPT
            elif not whole:
                region.scatter(page, *heads, view)
            sums = sums[protocol.CHECKSUM_BYTES :]
        return bytes(statuses)


def _views(region: Region, pages: list[int], read: Read, page_bytes: int) -> list[memoryview]:
    """The bytes to send: the pool's own when all its heads are wanted, else a copy of some."""
    if region.is_whole(read.first_head, read.last_head):
        return [region.page(page) for page in pages]
    scratch = np.empty(len(pages) * page_bytes, dtype=np.uint8).data
    views = [scratch[i * page_bytes : (i + 1) * page_bytes] for i in range(len(pages))]
    for page, view in zip(pages, views, strict=True):
        region.gather(page, read.first_head, read.last_head, view)
    return views
