"""Registered: a page server's host pools are registered with NIXL, and a reader reads by itself.

    page server                                    reader
      Lending: agent, pools and where they lie ──▶ meets the agent
                                                   … reads, as of lent.py, into a buffer of its
                                                   own, and from there into its pages

The buffer costs one more copy. For it a read that is given up, which NIXL may not stop, never
writes into a page that is somebody else's by then, and pages can be cut at heads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import msgspec
import numpy as np

from quire.decoders import msgpack_decoder
from quire.peer import protocol
from quire.peer.errors import PeerError
from quire.peer.nixl import NixlAgent
from quire.peer.protocol import Read, ReadAnswer
from quire.peer.region import Region
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

NAME = "nixl"


class _Registered(msgspec.Struct, frozen=True, array_like=True):
    lent: Lent
    address: int


class _Lending(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    metadata: bytes
    regions: list[_Registered]


class RegisteredOutlet:
    def __init__(self, agent: NixlAgent, regions: Iterable[Region]) -> None:
        self._unregister = []
        registered = []
        for region in regions:
            lent = lent_of(region)
            address = np.frombuffer(region.pool.page_view(0), dtype=np.uint8).ctypes.data
            size_bytes = lent.num_pages * lent.stride_bytes
            self._unregister.append(agent.register(address, size_bytes))
            registered.append(_Registered(lent, address))
        lending = _Lending(agent.name, agent.metadata(), registered)
        self._lending = msgspec.msgpack.encode(lending)

    def open(self, connection: Connection) -> None:
        connection.send_frame(self._lending)

    def give(self, connection: Connection, read: Read, granted: Granted) -> None:
        give_places(connection, granted)

    def close(self) -> None:
        while self._unregister:
            self._unregister.pop()()


class RemoteMemory:
    """What a page server has registered, as one connection knows it."""

    def __init__(self, agent: NixlAgent, lending: _Lending) -> None:
        """Raises PeerError."""
        self.agent = agent
        self.name = lending.agent
        self._regions = {one.lent.component: one for one in lending.regions}
        agent.meet(lending.agent, lending.metadata)
        weakref.finalize(self, agent.forget, lending.agent).atexit = False

    def of(self, component: str) -> tuple[Lent, int]:
        """And its address there. Raises PeerError."""
        found = self._regions.get(component)
        if found is None:
            raise PeerError(f"the peer does not share its pages of '{component}'")
        return found.lent, found.address


def receive_remote(connection: Connection, agent: NixlAgent) -> RemoteMemory:
    """Hands have been shaken. Raises what connections raise, PeerError."""
    frame = connection.recv_frame(protocol.MAX_FRAME_BYTES)
    try:
        lending = msgpack_decoder(_Lending).decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PeerError("the other side does not keep to the protocol") from error
    if not 0 < len(lending.regions) <= MAX_REGIONS:
        raise PeerError("the other side does not keep to the protocol")
    return RemoteMemory(agent, lending)


class RegisteredInlet:
    name = NAME
    max_ahead = 1

    def __init__(self, memory: RemoteMemory) -> None:
        self.memory = memory

    def take(self, connection: Connection, answer: ReadAnswer, wanted: Wanted) -> bytes:
        if not has_pages(answer):
            return answer.statuses
        lent, address = self.memory.of(wanted.region.component)
        places = places_of(answer, lent, wanted)
        stride, agent = lent.stride_bytes, self.memory.agent
        buffer = agent.borrow(len(places) * stride)
        begin = buffer.ctypes.data
        agent.read(
            self.memory.name,
            [(address + place * stride, stride) for place, _ in places],
            buffer,
            [(begin + i * stride, stride) for i in range(len(places))],
            connection.check_time,
        )
        try:
            _put(lent, buffer.data, wanted, [page for _, page in places])
        finally:
            agent.give_back(buffer)
        confirm_taken(connection, wanted)
        return answer.statuses


def _put(lent: Lent, memory: memoryview, wanted: Wanted, pages: list[int]) -> None:
    """What was read, one page after the other, into ours."""
    region = wanted.region
    theirs = lent_region(lent, memory, region.pool.layout, len(pages))
    for i, page in enumerate(pages):
        region.copy_from(theirs, i, page, wanted.first_head, wanted.last_head)
