"""ConnectionPool: authenticated connections to page servers, a few per address, used again.

Knows the handshake, what is mapped of peers on this machine, and when to give up on an address for
a while; not what connections are for.

    take ──▶ in use ──give_back──▶ idle ──take, or too old, or too many──▶ …
                 └──drop──▶ closed
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from quire.errors import ConfigError
from quire.peer.errors import PeerError, ReadCancelled
from quire.peer.greet import shake_hands
from quire.peer.handshake import TIMEOUT_S, Side, chosen_way, page_handshake, ways_of
from quire.peer.identity import Identity
from quire.peer.kinds import TransportKind
from quire.peer.nixl import NixlAgent
from quire.peer.transport import Cancelled, Connection, open_transport
from quire.peer.unix import dial_near, is_near
from quire.peer.ways.base import Inlet
from quire.peer.ways.mapped import MappedInlet, PeerMemory, receive_memory
from quire.peer.ways.pushed import PushedInlet
from quire.peer.ways.registered import RegisteredInlet, receive_remote

_MAX_ADDRESSES = 512
_WATCH_S = 1.0
_SLICE_S = 0.2
"""Longest wait before asking whether it is still wanted."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    per_address: int = 8
    """Connections to one page server, in use and idle."""
    idle_s: float = 60.0
    """Kept so long without use; less than servers do."""
    pause_s: float = 1.0
    """After an address could not be reached or refused us, before it is tried again."""


@dataclass(frozen=True, slots=True)
class PageLine:
    """A connection that is through the handshake, and how pages come in by it."""

    address: str
    connection: Connection
    inlet: Inlet


@dataclass(slots=True)
class _Idle:
    line: PageLine
    since: float


@dataclass(slots=True)
class _Address:
    num_open: int = 0
    num_waiting: int = 0
    """Threads; while there are any it is not forgotten."""
    idle: deque[_Idle] = field(default_factory=deque)
    """The latest used last."""
    not_before: float = 0.0
    reason: str = ""
    """Why it is not tried before then."""


class ConnectionPool:
    def __init__(
        self,
        identity: Identity,
        secret: str,
        limits: PoolLimits | None = None,
        nixl: NixlAgent | None = None,
    ) -> None:
        """`nixl`: by it only, of those who are not near."""
        self._nixl = nixl
        self._identity = identity
        self._secret = secret
        self._limits = limits or PoolLimits()
        self._changed = threading.Condition()
        self._addresses: OrderedDict[str, _Address] = OrderedDict()
        self._memories: WeakValueDictionary[str, PeerMemory] = WeakValueDictionary()
        """By near address; mapped once, however many connections use them."""
        self._watcher: threading.Thread | None = None
        self._stopped = threading.Event()
        self._closed = False

    @property
    def num_open(self) -> int:
        with self._changed:
            return sum(known.num_open for known in self._addresses.values())

    def take(self, address: str, deadline: float, cancelled: Cancelled) -> PageLine:
        """To be given back or dropped. Raises PeerError, TimeoutError, OSError, EOFError."""
        with self._changed:
            known = self._known(address)
            found = self._reserve(known, deadline, cancelled)
        if found is not None:
            return found
        patience = min(deadline, time.monotonic() + TIMEOUT_S)
        try:
            return self._dial(address, patience, cancelled)
        except (PeerError, ConfigError, EOFError, OSError) as error:
            impatient = isinstance(error, TimeoutError) and patience == deadline
            with self._changed:
                known.num_open -= 1
                if not impatient and not isinstance(error, ReadCancelled):
                    known.not_before = time.monotonic() + self._limits.pause_s
                    known.reason = str(error)
                self._changed.notify_all()
            if isinstance(error, ConfigError):
                raise PeerError(str(error)) from error
            raise

    def give_back(self, line: PageLine) -> None:
        """It has had its last answer."""
        with self._changed:
            known = self._addresses.get(line.address)
            if known is not None and not self._closed:
                known.idle.append(_Idle(line, time.monotonic()))
                self._changed.notify_all()
                return
        self.drop(line)

    def drop(self, line: PageLine) -> None:
        line.connection.close()
        with self._changed:
            known = self._addresses.get(line.address)
            if known is not None:
                known.num_open -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Those in use are closed when they come back."""
        self._stopped.set()
        with self._changed:
            self._closed = True
            for known in self._addresses.values():
                while known.idle:
                    known.idle.pop().line.connection.close()
                    known.num_open -= 1
            self._changed.notify_all()

    # ---- with the lock held ---------------------------------------------------------------------

    def _known(self, address: str) -> _Address:
        self._tidy()
        known = self._addresses.get(address)
        if known is None:
            if len(self._addresses) >= _MAX_ADDRESSES:
                raise PeerError(f"more than {_MAX_ADDRESSES} page servers at once")
            known = self._addresses[address] = _Address()
        return known

    def _reserve(self, known: _Address, deadline: float, cancelled: Cancelled) -> PageLine | None:
        """An idle one, or None and the right to open one."""
        while True:
            if self._closed or cancelled():
                raise ReadCancelled("cancelled")
            while known.idle:
                line = known.idle.pop().line
                if not line.connection.is_stale():
                    return line
                line.connection.close()
                known.num_open -= 1
            if known.num_open < self._limits.per_address:
                if time.monotonic() < known.not_before:
                    raise PeerError(f"not tried again yet: {known.reason}")
                known.num_open += 1
                return None
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no connection came free in time")
            known.num_waiting += 1
            self._changed.wait(min(left_s, _SLICE_S))
            known.num_waiting -= 1

    def _drop_stale(self, known: _Address) -> None:
        for _ in range(len(known.idle)):
            idle = known.idle.popleft()
            if idle.line.connection.is_stale():
                idle.line.connection.close()
                known.num_open -= 1
            else:
                known.idle.append(idle)

    def _tidy(self) -> None:
        """Close what has been idle for long; forget addresses without connections."""
        now = time.monotonic()
        for address, known in list(self._addresses.items()):
            while known.idle and now - known.idle[0].since > self._limits.idle_s:
                known.idle.popleft().line.connection.close()
                known.num_open -= 1
            if not known.num_open and not known.num_waiting and now >= known.not_before:
                del self._addresses[address]

    # ---- without the lock -----------------------------------------------------------------------

    def _dial(self, address: str, deadline: float, cancelled: Cancelled) -> PageLine:
        if is_near(address):
            return self._dial_near(address, deadline, cancelled)
        connection = open_transport(address).dial(address, deadline)
        if self._nixl is None:
            self._greet(connection, deadline, cancelled)
            return PageLine(address, connection, PushedInlet())
        way = self._greet(connection, deadline, cancelled, ways=(TransportKind.NIXL,))
        try:
            if not way:
                raise PeerError(f"{address} does not give pages by NIXL: set peer_transport there")
            memory = receive_remote(connection, self._nixl)
        except BaseException:
            connection.close()
            raise
        return PageLine(address, connection, RegisteredInlet(memory))

    def _dial_near(self, address: str, deadline: float, cancelled: Cancelled) -> PageLine:
        connection = dial_near(address, deadline)
        self._greet(connection, deadline, cancelled)
        try:
            memory = receive_memory(connection)
        except BaseException:
            connection.close()
            raise
        with self._changed:
            memory = self._memories.setdefault(address, memory)
            if self._watcher is None and not self._closed:
                self._watcher = threading.Thread(
                    target=self._watch, name="quire-peer-watch", daemon=True
                )
                self._watcher.start()
        return PageLine(address, connection, MappedInlet(memory))

    def _greet(
        self,
        connection: Connection,
        deadline: float,
        cancelled: Cancelled,
        *,
        ways: Sequence[str] = (),
    ) -> str:
        """The way that was chosen of these, if any."""
        try:
            connection.set_deadline(deadline, cancelled)
            handshake = page_handshake(
                Side.DIALER, self._secret, self._identity, is_local=connection.is_local, ways=ways
            )
            shake_hands(connection, handshake, dials=True)
            return chosen_way(ways, ways_of(handshake.peer_card))
        except BaseException:
            connection.close()
            raise

    def _watch(self) -> None:
        """Memory of a peer that has died goes back to the system, even if nobody asks it again."""
        while not self._stopped.wait(_WATCH_S):
            with self._changed:
                for address, known in self._addresses.items():
                    if is_near(address):
                        self._drop_stale(known)
