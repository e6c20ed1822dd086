"""SimNetwork: the lines between engines, in virtual time. SimHub: one engine's end of them.

SimHub speaks as PeerHub does. A message may come late, twice or before an earlier one; a line may
be cut, which both ends notice when they notice it, or stalled, which they take for a cut once they
have heard nothing for too long. What was under way on a line that is gone never arrives.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from quire.peer import messages
from quire.peer.hub import Connected, Disconnected, Hello, HubEvent, Received
from quire.peer.messages import PeerMessage
from quire.sim.clock import VirtualClock
from quire.sim.peers import LineState

_DELAY_S = 0.01
_LONG_DELAY_S = 4.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 1.0
_SAME_FOR_PAGES = 0.6
"""Share of disturbances that concern both kinds of connections."""
SILENCE_S = 3.0
"""Without hearing anything, before a link is given up."""


@dataclass(slots=True)
class NetworkTrouble:
    """Shares of messages."""

    duplicated: float = 0.0
    reordered: float = 0.0
    delayed: float = 0.0


@dataclass(slots=True, eq=False)
class _Connection:
    dialer: SimHub
    listener: SimHub
    since_s: float
    incoming: str
    """The listener's name for it."""
    is_up: bool = True
    latest_s: dict[str, float] = field(default_factory=dict)
    """By receiver: when the last message that was sent in order will arrive."""

    def other(self, hub: SimHub) -> tuple[SimHub, str]:
        if hub is self.dialer:
            return self.listener, self.incoming
        return self.dialer, self.listener.address


class SimHub:
    strangers = 0
    """Only engines that know each other are simulated."""

    def __init__(self, network: SimNetwork, hello: Hello, address: str) -> None:
        self.address = address
        self.hello = hello
        self.links: dict[str, _Connection] = {}
        self.events: list[HubEvent] = []
        self.wanted: dict[str, float] = {}
        """Address → pause before the next attempt."""
        self.numbers = itertools.count(1)
        self.closed = False
        self._network = network

    def connect(self, address: str) -> None:
        if address not in self.wanted and not self.closed:
            self.wanted[address] = _FIRST_RETRY_S
            self._network.dial(self, address)

    def disconnect(self, address: str) -> None:
        if self.wanted.pop(address, None) is not None and address in self.links:
            self._network.hang_up(self, address)

    def send(self, link: str, message: PeerMessage) -> bool:
        connection = self.links.get(link)
        if connection is None or self.closed:
            return False
        self._network.send(connection, self, message)
        return True

    def is_connected(self, address: str, since_s: float) -> bool:
        """To this one, all the time since then?"""
        connection = self.links.get(address)
        return connection is not None and connection.is_up and connection.since_s <= since_s

    def poll(self) -> list[HubEvent]:
        events, self.events = self.events, []
        return events

    def close(self) -> None:
        self._network.kill(self)


class SimNetwork:
    def __init__(
        self,
        clock: VirtualClock,
        rng: Random,
        trouble: NetworkTrouble,
        trace: Callable[[bytes], None] = lambda data: None,
        tell: Callable[[str, str, float], None] = lambda one, other, seconds: None,
    ) -> None:
        """`trace` sees everything that is sent; `tell` hears between whom a line is not as it
        should be, and for how long."""
        self.trouble = trouble
        self._tell = tell
        self._clock = clock
        self._rng = rng
        self._trace = trace
        self._hubs: dict[str, SimHub] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._bad: dict[tuple[str, str], tuple[LineState, float]] = {}
        """Pairs of addresses: how the line between them is, until when."""
        self._bad_for_pages: dict[tuple[str, str], tuple[LineState, float]] = {}
        self.counters: Counter[str] = Counter()

    def open(self, hello: Hello, address: str) -> SimHub:
        hub = self._hubs[address] = SimHub(self, hello, address)
        return hub

    def advance(self) -> None:
        """Let everything happen that is due."""
        now, agenda = self._clock(), self._agenda
        while agenda and agenda[0][0] <= now:
            heapq.heappop(agenda)[2]()

    def next_event_s(self) -> float | None:
        return self._agenda[0][0] if self._agenda else None

    def line(self, one: str, other: str) -> LineState:
        """For pages: they travel over connections of their own."""
        return self._state(self._bad_for_pages, _pair(one, other))

    # ---- trouble --------------------------------------------------------------------------------

    def disturb(self, one: str, other: str, line: LineState, seconds: float) -> None:
        """Cut or stall the line between two engines for a while; maybe not that for pages."""
        self.counters[line.name.lower()] += 1
        self._tell(one, other, seconds)
        now, pair = self._clock(), _pair(one, other)
        self._bad[pair] = line, now + seconds
        if self._rng.random() < _SAME_FOR_PAGES:
            self._bad_for_pages[pair] = line, now + seconds
        if line is LineState.STALLED:
            if seconds > SILENCE_S:
                self._later(SILENCE_S, lambda: self._drop(pair, "no sign of life"))
        else:
            self._drop(pair, "the connection failed")

    def heal(self) -> None:
        """From here on all is well, once the lines that are stalled go on."""
        self._bad = {pair: bad for pair, bad in self._bad.items() if bad[0] is LineState.STALLED}
        self._bad_for_pages.clear()
        self.trouble = NetworkTrouble()

    def kill(self, hub: SimHub) -> None:
        """The engine is gone; the other ends notice at once."""
        if hub.closed:
            return
        hub.closed = True
        if self._hubs.get(hub.address) is hub:
            del self._hubs[hub.address]
        for connection in list(hub.links.values()):
            connection.is_up = False
            other, link = connection.other(hub)
            self._notice(other, link, connection, "the peer closed the connection")

    # ---- for the hubs ---------------------------------------------------------------------------

    def hang_up(self, hub: SimHub, link: str) -> None:
        connection = hub.links[link]
        connection.is_up = False
        other, there = connection.other(hub)
        self._notice(hub, link, connection, "we disconnected")
        self._notice(other, there, connection, "the peer closed the connection")

    def dial(self, hub: SimHub, address: str) -> None:
        self._later(self._delay_s(), lambda: self._dialled(hub, address))

    def send(self, connection: _Connection, sender: SimHub, message: PeerMessage) -> None:
        rng, trouble = self._rng, self.trouble
        data = messages.encode(message)
        self._trace(data)
        copies = 2 if rng.random() < trouble.duplicated else 1
        if copies == 2:
            self.counters[f"duplicated:{type(message).__name__}"] += 1
        receiver, link = connection.other(sender)
        for _ in range(copies):
            at = self._clock() + self._delay_s()
            if rng.random() < trouble.delayed:
                at += rng.uniform(0.1, _LONG_DELAY_S)
                self._tell(sender.address, receiver.address, at - self._clock())
            latest = connection.latest_s.get(receiver.address, 0.0)
            if rng.random() < trouble.reordered:
                self.counters["overtook"] += at < latest
                self._tell(sender.address, receiver.address, max(at, latest) - self._clock())
            else:
                at = connection.latest_s[receiver.address] = max(at, latest)
            self._at(at, lambda: self._deliver(connection, receiver, link, data))

    # ---- inside ---------------------------------------------------------------------------------

    def _deliver(self, connection: _Connection, receiver: SimHub, link: str, data: bytes) -> None:
        if not connection.is_up or receiver.closed:
            return
        pair = _pair(connection.dialer.address, connection.listener.address)
        state, until_s = self._bad.get(pair, (LineState.UP, 0.0))
        if state is LineState.STALLED and self._clock() < until_s:
            self._at(until_s, lambda: self._deliver(connection, receiver, link, data))
            return
        receiver.events.append(Received(link, messages.decode(data)))

    def _dialled(self, hub: SimHub, address: str) -> None:
        if hub.closed or address not in hub.wanted or address in hub.links:
            return
        target = self._hubs.get(address)
        state = self._state(self._bad, _pair(hub.address, address))
        if target is None or state is not LineState.UP:
            hub.events.append(Disconnected(address, f"{address} cannot be reached"))
            hub.wanted[address] = min(2 * hub.wanted[address], _LAST_RETRY_S)
            self._later(hub.wanted[address], lambda: self._dialled(hub, address))
            return
        hub.wanted[address] = _FIRST_RETRY_S
        incoming = f"in-{next(target.numbers)}"
        connection = _Connection(hub, target, self._clock(), incoming)
        hub.links[address] = target.links[incoming] = connection
        hub.events.append(Connected(address, target.hello))
        target.events.append(Connected(incoming, hub.hello))
        self.counters["connected"] += 1

    def _state(
        self, bad: dict[tuple[str, str], tuple[LineState, float]], pair: tuple[str, str]
    ) -> LineState:
        state, until_s = bad.get(pair, (LineState.UP, 0.0))
        return state if self._clock() < until_s else LineState.UP

    def _drop(self, pair: tuple[str, str], reason: str) -> None:
        """Each end notices in its own time."""
        for hub in self._hubs.values():
            for link, connection in list(hub.links.items()):
                ends = _pair(connection.dialer.address, connection.listener.address)
                if ends == pair and connection.is_up:
                    connection.is_up = False
                    other, there = connection.other(hub)
                    self._notice_later(hub, link, connection, reason)
                    self._notice_later(other, there, connection, reason)

    def _notice_later(self, hub: SimHub, link: str, connection: _Connection, reason: str) -> None:
        wait_s = self._rng.choice((0.0, self._rng.random() * SILENCE_S))
        self._later(wait_s, lambda: self._notice(hub, link, connection, reason))

    def _notice(self, hub: SimHub, link: str, connection: _Connection, reason: str) -> None:
        if hub.closed or hub.links.get(link) is not connection:
            return
        del hub.links[link]
        hub.events.append(Disconnected(link, reason))
        if hub is connection.dialer:
            self._later(_FIRST_RETRY_S, lambda: self._dialled(hub, link))

    def _delay_s(self) -> float:
        return _DELAY_S * self._rng.expovariate(1.0)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._at(self._clock() + seconds, action)

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._agenda, (time_s, self._sequence, action))


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
