"""Mapped: a reader on the same machine maps the host pools of a page server, and copies by itself.

    page server                                reader
      Lending, then a descriptor per pool ──▶  maps them, to read only
                                               … reads, as of lent.py

A mapping lives as long as a connection that uses it: when one of the two dies, so does the
connection, and the memory goes back with the last of them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Mapping

import msgspec

from quire.decoders import msgpack_decoder
from quire.memory.shared import map_shared
from quire.peer import protocol
from quire.peer.errors import PeerError
from quire.peer.protocol import Read, ReadAnswer
from quire.peer.region import Region
from quire.peer.sockets import SocketConnection
from quire.peer.transport import Connection
from quire.peer.ways.base import Granted, Wanted
from quire.peer.ways.lent import (
    MAX_REGIONS,
    Lent,
    confirm_taken,
    give_places,
    has_pages,
    lent_of,
    lent_region,
    places_of,
)


class _Lending(msgspec.Struct, frozen=True, array_like=True):
    regions: list[Lent]


class MappedOutlet:
    def __init__(self, regions: Iterable[Region]) -> None:
        """All of them can be shared."""
        self._descriptors = []
        lent = []
        for region in regions:
            if region.pool.descriptor is None:
                raise ValueError(f"the pool of '{region.component}' is not shared")
            self._descriptors.append(region.pool.descriptor)
            lent.append(lent_of(region))
        self._lending = msgspec.msgpack.encode(_Lending(lent))

    def open(self, connection: Connection) -> None:
        assert isinstance(connection, SocketConnection)
        connection.send_frame(self._lending)
        connection.send_descriptors(self._descriptors)

    def give(self, connection: Connection, read: Read, granted: Granted) -> None:
        give_places(connection, granted)

    def close(self) -> None:
        """Descriptors are the pools' own."""


class PeerMemory:
    """What a page server has lent, mapped."""

    def __init__(self, lent: Mapping[str, tuple[Lent, mmap.mmap]]) -> None:
        self._lent = lent

    def of(self, component: str) -> tuple[Lent, memoryview]:
        """Raises PeerError."""
        found = self._lent.get(component)
        if found is None:
            raise PeerError(f"the peer does not share its pages of '{component}'")
        return found[0], memoryview(found[1])


def receive_memory(connection: SocketConnection) -> PeerMemory:
    """Hands have been shaken. Raises what connections raise, PeerError, NotShareable."""
    frame = connection.recv_frame(protocol.MAX_FRAME_BYTES)
    try:
        lending = msgpack_decoder(_Lending).decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError("the other side does not keep to the protocol") from error
    if not 0 < len(lending.regions) <= MAX_REGIONS:
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

    def take(self, connection: Connection, answer: ReadAnswer, wanted: Wanted) -> bytes:
        if not has_pages(answer):
            return answer.statuses
        region = wanted.region
        lent, memory = self.memory.of(region.component)
        theirs = lent_region(lent, memory, region.pool.layout, lent.num_pages)
        for place, page in places_of(answer, lent, wanted):
            connection.check_time()
            region.copy_from(theirs, place, page, wanted.first_head, wanted.last_head)
        confirm_taken(connection, wanted)
        return answer.statuses
