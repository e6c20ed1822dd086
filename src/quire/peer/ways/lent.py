"""Lent pages: another engine's pools as a reader knows them, and the last word on what was copied.

    ReadAnswer(statuses, places)   ──▶   copies pages from their places
                                   ◀──   TAKEN
    TAKEN, still in the grant      ──▶   the copies hold

The last word is what a checksum is on a wire: pages of a grant do not change, so what was copied
between answer and last word is right. A reader that is stopped for so long that it is dropped does
not hear that word, and takes nothing for good. How bytes are copied is a way's own matter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from quire.memory.page_layout import PageLayout
from quire.peer import protocol
from quire.peer.errors import PeerError
from quire.peer.protocol import TAKEN, ReadAnswer
from quire.peer.region import Region
from quire.peer.transport import Connection
from quire.peer.ways.base import Granted, Wanted
from quire.types import PageStatus

MAX_REGIONS = 64
_PLACE = np.dtype("<i4")


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """One component's pool."""

    component: str
    num_pages: int
    stride_bytes: int
    first_head: int
    last_head: int


def lent_of(region: Region) -> Lent:
    pool = region.pool
    return Lent(
        region.component,
        pool.num_pages,
        pool.layout.page_stride_bytes,
        region.first_head,
        region.last_head,
    )


@dataclass(frozen=True, slots=True)
class LentPool:
    """Another engine's host pages, where they are, or where they have been put."""

    layout: PageLayout
    num_pages: int
    memory: memoryview

    @property
    def descriptor(self) -> None:
        """Not ours to pass on."""

    def page_view(self, page: int) -> memoryview:
        stride = self.layout.page_stride_bytes
        return self.memory[page * stride : (page + 1) * stride]


def lent_region(lent: Lent, memory: memoryview, ours: PageLayout, num_pages: int) -> Region:
    """Theirs, of the same kind as ours but for the heads. Raises PeerError."""
    layout = replace(ours, num_kv_heads=lent.last_head - lent.first_head)
    if layout.page_stride_bytes != lent.stride_bytes:
        raise PeerError(f"the peer's pages of '{lent.component}' have another length")
    return Region(LentPool(layout, num_pages, memory), lent.first_head, lent.last_head)


def give_places(connection: Connection, granted: Granted) -> None:
    """Answer where pages are, and come back when the reader has them."""
    places = np.array(granted.pages, dtype=_PLACE).tobytes()
    answer = ReadAnswer(granted.statuses, granted.page_bytes, b"", places)
    connection.send_frame(protocol.encode(answer))
    if granted.pages:
        if connection.recv_frame(len(TAKEN)) != TAKEN:
            raise PeerError("the other side does not keep to the protocol")
        connection.send_frame(TAKEN)


def has_pages(answer: ReadAnswer) -> bool:
    """Raises PeerError for places of pages that are not OK."""
    found = PageStatus.OK in answer.statuses
    if answer.places and not found:
        raise PeerError(protocol.NOT_TO_WHAT_WAS_ASKED)
    return found


def places_of(answer: ReadAnswer, lent: Lent, wanted: Wanted) -> list[tuple[int, int]]:
    """Their pages that are OK, of which there are some, and ours that they are for. Raises
    PeerError."""
    places = np.frombuffer(answer.places, dtype=np.uint8)
    ok = [i for i, status in enumerate(answer.statuses) if status == PageStatus.OK]
    if len(places) != len(ok) * _PLACE.itemsize:
        raise PeerError(protocol.NOT_TO_WHAT_WAS_ASKED)
    pages = places.view(_PLACE)
    is_held = lent.first_head <= wanted.first_head < wanted.last_head <= lent.last_head
    if pages.min() < 0 or pages.max() >= lent.num_pages or not is_held:
        raise PeerError(protocol.NOT_TO_WHAT_WAS_ASKED)
    return [(page, wanted.pages[i]) for page, i in zip(pages.tolist(), ok, strict=True)]


def confirm_taken(connection: Connection, wanted: Wanted) -> None:
    """All that was answered has been copied: it holds once this returns."""
    connection.set_deadline(time.monotonic() + wanted.timeout_s, wanted.cancelled)
    connection.send_frame(TAKEN)
    if connection.recv_frame(len(TAKEN)) != TAKEN:
        raise PeerError("the other side does not keep to the protocol")
