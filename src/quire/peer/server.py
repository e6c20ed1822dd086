"""PageServer: gives out pages of one rank's host pools that the leader has granted.

Knows connections and regions; which pages may be read, and until when, is in its grants. Names in,
bytes out: a reader names a grant and indexes into it, each checked, and gets the bytes of the pages
there straight from the pool, by the way that its connection came (ways/). Whatever is not granted
gets a status instead.

One thread per connection, up to a limit. A reader that stalls is dropped, so that a grant that was
revoked is free again after a bounded time.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from quire.errors import ConfigError
from quire.peer import protocol
from quire.peer.errors import PeerError
from quire.peer.grants import Grant, Grants, OnFree
from quire.peer.greet import shake_hands
from quire.peer.handshake import TIMEOUT_S, Side, chosen_way, page_handshake, ways_of
from quire.peer.identity import Identity
from quire.peer.kinds import TransportKind
from quire.peer.nixl import NixlAgent
from quire.peer.protocol import Read, ReadAnswer
from quire.peer.region import Region
from quire.peer.tickets import Tickets
from quire.peer.transport import Connection, Listener, open_transport
from quire.peer.unix import listen_near, near_address
from quire.peer.ways.base import Granted, Outlet
from quire.peer.ways.mapped import MappedOutlet
from quire.peer.ways.pushed import PushedOutlet
from quire.peer.ways.registered import RegisteredOutlet
from quire.types import OperationId, PageIds, PageStatus

_ACCEPT_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class ServerLimits:
    max_connections: int = 512
    """Of peers; one more closes the one that was idle for longest."""
    max_strangers: int = 64
    """Connections that have not shaken hands yet; one more closes the oldest of them, so that
    those who say nothing keep nobody out."""
    max_wait_s: float = 10.0
    """For a grant that a reader has heard of before we have."""
    send_timeout_s: float = 10.0
    """For the bytes of one read to be taken."""
    idle_s: float = 300.0
    """Without a read, before a connection is closed."""


class _State(enum.Enum):
    """STRANGER ──hands shaken──▶ IDLE ⇄ READING; any ──no room──▶ LEAVING"""

    STRANGER = enum.auto()
    IDLE = enum.auto()
    READING = enum.auto()
    LEAVING = enum.auto()


@dataclass(slots=True)
class _Guest:
    thread: threading.Thread
    state: _State = _State.STRANGER


class PageServer:
    def __init__(
        self,
        address: str,
        *,
        identity: Identity,
        secret: str,
        epoch: str,
        regions: Iterable[Region],
        tickets: Tickets,
        kind: TransportKind = TransportKind.AUTO,
        limits: ServerLimits | None = None,
        nixl: NixlAgent | None = None,
    ) -> None:
        """Listens at once. `nixl`: whoever can may read by it. Raises ConfigError when it
        cannot."""
        self._identity = identity
        self._secret = secret
        self._epoch = epoch
        self._regions = {region.component: region for region in regions}
        self._tickets = tickets
        self._limits = limits or ServerLimits()
        self._grants = Grants()
        self._lock = threading.Lock()
        self._guests: dict[Connection, _Guest] = {}
        """The longest quiet first."""
        self._sent_pages = 0
        self._sent_bytes = 0
        self._closed = False
        self._doors: dict[Listener, dict[str, Outlet]] = {}
        """By each, the ways there are; the first is for readers who name none."""
        self._listener = open_transport(address).listen(address)
        try:
            self._doors[self._listener] = self._far_ways(nixl)
            self._open_near(kind)
        except ConfigError:
            self._listener.close()
            raise
        self._accepting = [
            threading.Thread(target=self._accept, args=door, name="quire-pages-accept", daemon=True)
            for door in self._doors.items()
        ]
        for thread in self._accepting:
            thread.start()

    def _far_ways(self, nixl: NixlAgent | None) -> dict[str, Outlet]:
        ways: dict[str, Outlet] = {TransportKind.TCP: PushedOutlet()}
        if nixl is not None:
            try:
                ways[TransportKind.NIXL] = RegisteredOutlet(nixl, self._regions.values())
            except PeerError as error:
                raise ConfigError(str(error)) from error
        return ways

    def _open_near(self, kind: TransportKind) -> None:
        """For readers on this machine, if they may have our memory."""
        regions = list(self._regions.values())
        if not kind.shares_memory:
            return
        if all(region.pool.descriptor is not None for region in regions):
            near = near_address(self._secret, self._epoch, self.address)
            self._doors[listen_near(near)] = {TransportKind.SHM: MappedOutlet(regions)}
        elif kind is TransportKind.SHM:
            raise ConfigError(
                "peer_transport is shm, but this system cannot share host memory: set it to tcp"
            )

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def num_connections(self) -> int:
        return len(self._guests)

    def counters(self) -> dict[str, int]:
        with self._lock:
            return {"peer_sent_pages": self._sent_pages, "peer_sent_bytes": self._sent_bytes}

    def grant(self, op: OperationId, component: str, pages: PageIds) -> bool:
        """Let peers read these pages (checked by the caller). False: granted already."""
        return self._grants.add(op, component, pages)

    def revoke(self, op: OperationId, component: str, on_free: OnFree) -> None:
        """Let nobody read them from here on. on_free is called once, from any thread, as soon as
        nobody does: at once if nobody is at it now, or if there is no such grant."""
        self._grants.revoke(op, component, on_free)

    def close(self, timeout_s: float = 5.0) -> bool:
        """False if a thread hangs on: it may still read from the pools."""
        self._closed = True
        for listener in self._doors:
            listener.close()
        self._grants.close()
        with self._lock:
            threads = [*self._accepting, *(guest.thread for guest in self._guests.values())]
            for connection in self._guests:
                connection.interrupt()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            return False
        for outlets in self._doors.values():
            for outlet in outlets.values():
                outlet.close()
        return True

    # ---- connections ----------------------------------------------------------------------------

    def _accept(self, listener: Listener, outlets: Mapping[str, Outlet]) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:  # it went away again, or we have no descriptors left
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            if connection is None:
                return
            thread = threading.Thread(
                target=self._serve, args=(connection, outlets), name="quire-pages", daemon=True
            )
            with self._lock:
                if not self._closed:
                    self._make_room(_State.STRANGER, self._limits.max_strangers)
                    self._guests[connection] = _Guest(thread)
                    thread.start()
            if self._closed:
                connection.close()

    def _make_room(self, state: _State, most: int) -> None:
        """End the one that has been so for longest, if there are too many. With the lock held."""
        found = [c for c, guest in self._guests.items() if guest.state is state]
        if len(found) >= most:
            self._guests[found[0]].state = _State.LEAVING
            found[0].interrupt()

    def _enter(self, connection: Connection, state: _State) -> bool:
        """It is so from now on. False: it is to go."""
        with self._lock:
            guest = self._guests.pop(connection)
            self._guests[connection] = guest
            if guest.state is _State.LEAVING:
                return False
            known = [g for g in self._guests.values() if g.state in (_State.IDLE, _State.READING)]
            if guest.state is _State.STRANGER and len(known) >= self._limits.max_connections:
                idle = sum(g.state is _State.IDLE for g in known)
                self._make_room(_State.IDLE, idle or 1)
                if not idle:
                    return False
            guest.state = state
            return True

    def _serve(self, connection: Connection, outlets: Mapping[str, Outlet]) -> None:
        """One connection's life. However it ends, it costs that connection and no more."""
        try:
            connection.set_deadline(time.monotonic() + TIMEOUT_S)
            handshake = page_handshake(
                Side.LISTENER,
                self._secret,
                self._identity,
                is_local=connection.is_local,
                ways=list(outlets),
            )
            shake_hands(connection, handshake, dials=False)
            way = chosen_way(ways_of(handshake.peer_card), list(outlets))
            outlet = outlets[way or next(iter(outlets))]
            outlet.open(connection)
            while not self._closed and self._enter(connection, _State.IDLE):
                connection.set_deadline(time.monotonic() + self._limits.idle_s)
                frame = connection.recv_frame(protocol.MAX_FRAME_BYTES)
                if not self._enter(connection, _State.READING):
                    return
                self._answer(connection, protocol.decode_read(frame), outlet)
        except (PeerError, EOFError, OSError, msgspec.DecodeError, ValueError, RecursionError):
            pass  # gone, too slow, or no peer of ours
        finally:
            with self._lock:
                self._guests.pop(connection, None)
            with contextlib.suppress(OSError):
                connection.close()

    # ---- reads ----------------------------------------------------------------------------------

    def _answer(self, connection: Connection, read: Read, outlet: Outlet) -> None:
        if not 0 < read.count <= protocol.MAX_PAGES_PER_READ:
            raise PeerError("the other side does not keep to the protocol")
        region = self._regions.get(read.component)
        if region is None or not region.holds(read.first_head, read.last_head):
            self._send_nothing(connection, read, PageStatus.FAILED)
            return
        grant = None
        if read.epoch == self._epoch and self._tickets.fits(read.grant, read.ticket):
            wait_s = min(read.wait_s, self._limits.max_wait_s)
            grant = self._grants.enter(OperationId(read.grant), read.component, wait_s)
        if grant is None:
            self._send_nothing(connection, read, PageStatus.MISS)
            return
        try:
            self._send_pages(connection, read, outlet, region, grant)
        finally:
            self._grants.leave(grant)

    def _send_nothing(self, connection: Connection, read: Read, status: PageStatus) -> None:
        connection.set_deadline(time.monotonic() + self._limits.send_timeout_s)
        answer = ReadAnswer(bytes([status]) * read.count, 0, b"")
        connection.send_frame(protocol.encode(answer))

    def _send_pages(
        self, connection: Connection, read: Read, outlet: Outlet, region: Region, grant: Grant
    ) -> None:
        start, held = read.start, len(grant.pages)
        if not 0 <= start < held:
            self._send_nothing(connection, read, PageStatus.MISS)
            return
        page_bytes = region.cut_bytes(read.first_head, read.last_head)
        # Of the read, [start, end) is in the grant, and [start, stop) is not too much at once.
        end = min(start + read.count, held)
        stop = min(end, start + max(1, protocol.MAX_READ_BYTES // page_bytes))
        statuses = (
            bytes([PageStatus.OK]) * (stop - start)
            + bytes([PageStatus.REJECTED]) * (end - stop)
            + bytes([PageStatus.MISS]) * (start + read.count - end)
        )
        pages = grant.pages[start:stop].tolist()
        connection.set_deadline(time.monotonic() + self._limits.send_timeout_s)
        outlet.give(connection, read, Granted(region, pages, statuses, page_bytes))
        with self._lock:
            self._sent_pages += len(pages)
            self._sent_bytes += len(pages) * page_bytes
