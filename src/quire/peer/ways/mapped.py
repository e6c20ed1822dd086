"""Mapped: a reader on the same machine maps the host pools of a page server, and copies by itself.

    page server                                reader
      Lending, then a descriptor per pool ──▶  maps them, to read only
                                               …
      Answer(statuses, places)            ──▶  copies pages from their places
                                          ◀──  TAKEN
      TAKEN, still in the grant           ──▶  the copies hold
      leaves the grant

The last word is what a checksum is on a wire: pages of a grant do not change, so what was copied
between answer and last word is right. A reader that is stopped for so long that it is dropped does
not hear that word, and takes nothing for good.

A mapping lives as long as a connection that uses it: when one of the two dies, so does the
connection, and the memory goes back with the last of them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from quire.memory.layout import PageLayout
from quire.memory.shared import map_shared
from quire.peer import protocol
from quire.peer.errors import PeerError
from quire.peer.protocol import TAKEN, Answer, Read
from quire.peer.region import Region
from quire.peer.sockets import SocketConnection
from quire.peer.transport import Connection
from quire.peer.ways.base import Granted, Wanted
from quire.types import PageStatus

_PLACE = np.dtype("<i4")
_MAX_REGIONS = 64


class _Lent(msgspec.Struct, frozen=True, array_like=True):
    """One component's pool, as its descriptor has it."""

    component: str
    num_pages: int
    stride_bytes: int
    first_head: int
    last_head: int


class _Lending(msgspec.Struct, frozen=True, array_like=True):
    regions: list[_Lent]


class MappedOutlet:
    def __init__(self, regions: Iterable[Region]) -> None:
        """All of them can be shared."""
        self._descriptors = []
        lent = []
        for region in regions:
            pool = region.pool
            if pool.descriptor is None:
                raise ValueError(f"the pool of '{region.component}' is not shared")
            self._descriptors.append(pool.descriptor)
            lent.append(
                _Lent(
                    region.component,
                    pool.num_pages,
                    pool.layout.page_stride_bytes,
                    region.first_head,
                    region.last_head,
                )
            )
        self._lending = msgspec.msgpack.encode(_Lending(lent))

    def open(self, connection: Connection) -> None:
        assert isinstance(connection, SocketConnection)
        connection.send_frame(self._lending)
        connection.send_descriptors(self._descriptors)

    def give(self, connection: Connection, read: Read, granted: Granted) -> None:
        places = np.array(granted.pages, dtype=_PLACE).tobytes()
        answer = Answer(granted.statuses, granted.page_bytes, b"", places)
        connection.send_frame(protocol.encode(answer))
        if granted.pages:
            if connection.recv_frame(len(TAKEN)) != TAKEN:
                raise PeerError("the other side does not keep to the protocol")
            connection.send_frame(TAKEN)


@dataclass(frozen=True, slots=True)
class _MappedPool:
    """Another engine's host pages, where they are."""

    layout: PageLayout
    num_pages: int
    memory: mmap.mmap

    @property
    def descriptor(self) -> None:
        """Not ours to pass on."""

    def page_view(self, page: int) -> memoryview:
        stride = self.layout.page_stride_bytes
        return memoryview(self.memory)[page * stride : (page + 1) * stride]


class PeerMemory:
    """What a page server has lent, mapped."""

    def __init__(self, lent: Mapping[str, tuple[_Lent, mmap.mmap]]) -> None:
        self._lent = lent

    def region(self, component: str, ours: PageLayout) -> Region:
        """Theirs, of the same kind as ours but for the heads. Raises PeerError."""
        found = self._lent.get(component)
        if found is None:
            raise PeerError(f"the peer does not share its pages of '{component}'")
        lent, memory = found
        layout = replace(ours, num_kv_heads=lent.last_head - lent.first_head)
        if layout.page_stride_bytes != lent.stride_bytes:
            raise PeerError(f"the peer's pages of '{component}' have another length")
        pool = _MappedPool(layout, lent.num_pages, memory)
        return Region(pool, lent.first_head, lent.last_head)


def receive_memory(connection: SocketConnection) -> PeerMemory:
    """Hands have been shaken. Raises what connections raise, PeerError, NotShareable."""
    frame = connection.recv_frame(protocol.MAX_FRAME_BYTES)
    try:
        lending = msgspec.msgpack.decode(frame, type=_Lending)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError("the other side does not keep to the protocol") from error
    if not 0 < len(lending.regions) <= _MAX_REGIONS:
        raise PeerError("the other side does not keep to the protocol")
    descriptors = connection.recv_descriptors(len(lending.regions))
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        return PeerMemory(
            {
                lent.component: (lent, map_shared(descriptor, lent.num_pages * lent.stride_bytes))
                for lent, descriptor in zip(lending.regions, descriptors, strict=True)
            }
        )


class MappedInlet:
    name = "shm"
    max_ahead = 1

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory

    def take(self, connection: Connection, answer: Answer, wanted: Wanted) -> bytes:
        places = np.frombuffer(answer.places, dtype=np.uint8)
        num_ok = answer.statuses.count(PageStatus.OK)
        if len(places) != num_ok * _PLACE.itemsize:
            raise PeerError(protocol.NOT_TO_WHAT_WAS_ASKED)
        if not num_ok:
            return answer.statuses
        region = wanted.region
        theirs = self.memory.region(region.component, region.pool.layout)
        heads = wanted.first_head, wanted.last_head
        pages = places.view(_PLACE)
        if pages.min() < 0 or pages.max() >= theirs.pool.num_pages or not theirs.holds(*heads):
            raise PeerError(protocol.NOT_TO_WHAT_WAS_ASKED)
        ok = (i for i, status in enumerate(answer.statuses) if status == PageStatus.OK)
        for index, place in zip(ok, pages.tolist(), strict=True):
            connection.check_time()
            region.copy_from(theirs, place, wanted.pages[index], *heads)
        connection.set_deadline(time.monotonic() + wanted.timeout_s, wanted.cancelled)
        connection.send_frame(TAKEN)
        if connection.recv_frame(len(TAKEN)) != TAKEN:
            raise PeerError("the other side does not keep to the protocol")
        return answer.statuses
