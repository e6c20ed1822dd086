"""Nodes: the servers behind one URL, which of them has a key, and calls that go to all at once.

    exchanges ──by key──▶ node A: all of its commands, then all of its answers
                     └──▶ node B: the same, sent before A's answers are read

One server is a cluster of one. Connections are kept for the next call, as many as calls were made
at once. What fails, fails for the exchanges of that node; who held a connection that died while
nobody used it, or asked a node that has given its keys away, asks once more.

    MOVED slot B    B has the slot by now: it is asked, and who has what is looked up anew
    ASK slot B      the slot is on its way to B, and this key is not here any more: B is asked,
                    with ASKING before it, and the next time A again
    no answer       its replica may have taken over: the others are asked who has what

Connections go stale and nobody says so: a firewall forgets the quiet ones, and a name leads to
another server after a failover, while the old one goes on serving as a replica. So who did not get
an answer, or is told that nothing is written there, keeps no connection to that server.
"""

from __future__ import annotations

import binascii
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from quire.errors import StoreError
from quire.store.redis.connection import Address, Login, RedisConnection, is_full, turned_away
from quire.store.redis.wire import ProtocolError, RedisAnswer, ServerError, WireBuffer, command

_NUM_SLOTS = 16384
_MAX_IDLE = 32
_TRIES = 3

RedisFailure = OSError | ProtocolError | ServerError | StoreError


class RedisExchange(NamedTuple):
    """One command, and how its answer is read. A tuple: one of each is made per page moved."""

    key: bytes
    """With its part in braces: that decides who has it."""
    said: Iterable[WireBuffer]
    """Gone through when it is sent, and again if it must be sent again."""
    hear: Callable[[RedisConnection], Any] = RedisConnection.answer


class _Elsewhere(NamedTuple):
    """Where a node says that a key is."""

    address: Address
    is_on_its_way: bool


class Nodes:
    def __init__(self, address: Address, login: Login, *, deadline: float) -> None:
        """Raises OSError, StoreError, ProtocolError."""
        self._first = address
        self._login = login
        self._lock = threading.Lock()
        self._idle: dict[Address, list[RedisConnection]] = defaultdict(list)
        self._is_closed = False
        self._slots: list[Address] | None = None
        """None: one server has all."""
        self._silent: set[Address] = set()
        """Nodes of a cluster that did not answer since it was last looked up who has what."""
        try:
            self._look_around(deadline)
        except BaseException:
            self.close()
            raise

    @property
    def is_cluster(self) -> bool:
        return self._slots is not None

    @property
    def addresses(self) -> list[Address]:
        """Each that has keys."""
        slots = self._slots
        return [self._first] if slots is None else list(dict.fromkeys(slots))

    def ask(self, exchanges: Sequence[RedisExchange], deadline: float) -> list[Any]:
        """Each one's answer, or RedisFailure."""
        answers: list[Any] = [None] * len(exchanges)
        elsewhere: dict[int, _Elsewhere] = {}
        left: Iterable[int] = range(len(exchanges))
        if self._silent:  # of a call that had no time left to ask the others
            self._looked_around(deadline)
        for _ in range(_TRIES):
            groups: dict[Address, list[int]] = defaultdict(list)
            for index in left:
                there = elsewhere.get(index)
                groups[there.address if there else self._owner(exchanges[index].key)].append(index)
            again = self._round(exchanges, groups, elsewhere, answers, deadline)
            if not again:
                break
            left = again
            is_stale = self._silent or any(_is_stale(answers[index]) for index in again)
            if is_stale and not self._looked_around(deadline):
                break
        return answers

    def ask_node(self, address: Address, words: Sequence[bytes], deadline: float) -> RedisAnswer:
        """Raises RedisFailure."""
        connection = self._take(address, deadline)
        try:
            connection.send(command(*words), deadline)
            answer = connection.answer()
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        if isinstance(answer, ServerError):
            raise answer
        return answer

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, defaultdict(list)
        for connections in idle.values():
            for connection in connections:
                connection.close()

    # ---- one round ------------------------------------------------------------------------------

    def _round(
        self,
        exchanges: Sequence[RedisExchange],
        groups: dict[Address, list[int]],
        elsewhere: dict[int, _Elsewhere],
        answers: list[Any],
        deadline: float,
    ) -> list[int]:
        """Fills in answers, and where else they are to be had. Returns those to be asked for once
        more."""
        again: list[int] = []
        under_way: list[tuple[RedisConnection, list[int]]] = []
        asking = {index for index, there in elsewhere.items() if there.is_on_its_way}
        elsewhere.clear()

        def said(indices: list[int]) -> Iterator[WireBuffer]:
            for index in indices:
                if index in asking:
                    yield from command(b"ASKING")
                yield from exchanges[index].said

        for address, indices in groups.items():
            try:
                connection = self._take(address, deadline)
            except (OSError, StoreError, ProtocolError) as error:
                _fail(answers, indices, error)
                if isinstance(error, OSError) and self._may_be_replaced(address):
                    again += indices
                continue
            try:
                connection.send(said(indices), deadline)
            except OSError as error:
                again += self._broken(connection, indices, answers, error)
            except BaseException:  # of whoever makes what is said: half of it was
                connection.close()
                raise
            else:
                under_way.append((connection, indices))
        for connection, indices in under_way:
            heard = [(index, exchanges[index], index in asking) for index in indices]
            again += self._hear(connection, heard, elsewhere, answers)
        return again

    def _hear(
        self,
        connection: RedisConnection,
        heard: Sequence[tuple[int, RedisExchange, bool]],
        elsewhere: dict[int, _Elsewhere],
        answers: list[Any],
    ) -> list[int]:
        again: list[int] = []
        for place, (index, exchange, asking) in enumerate(heard):
            try:
                if asking:
                    connection.answer()
                answers[index] = exchange.hear(connection)
            except (OSError, ProtocolError) as error:
                left = [index for index, _, _ in heard[place:]]
                return again + self._broken(connection, left, answers, error)
            except BaseException:
                connection.close()
                raise
            if not isinstance(answers[index], ServerError):
                continue
            there = _elsewhere(answers[index], connection.address)
            if there is not None:
                elsewhere[index] = there
            if there is not None or _is_stale(answers[index]):
                again.append(index)
        if any(_takes_no_writes(answers[index]) for index, _, _ in heard):
            connection.close()
            self._drop_idle(connection.address)
        else:
            self._give_back(connection)
        return again

    def _broken(
        self,
        connection: RedisConnection,
        indices: list[int],
        answers: list[Any],
        error: OSError | ProtocolError,
    ) -> list[int]:
        """It died. While nobody used it? Then others that were kept have, too."""
        connection.close()
        _fail(answers, indices, error)
        if not isinstance(error, OSError):
            return []
        self._drop_idle(connection.address)
        if not connection.is_used or not isinstance(error, ConnectionError):
            return indices if self._may_be_replaced(connection.address) else []
        return indices

    def _may_be_replaced(self, address: Address) -> bool:
        """A node that does not answer: in a cluster others know whether it has its keys still."""
        if self.is_cluster:
            with self._lock:
                self._silent.add(address)
        return self.is_cluster

    # ---- connections ----------------------------------------------------------------------------

    def _take(self, address: Address, deadline: float) -> RedisConnection:
        with self._lock:
            if self._is_closed:
                raise StoreError("the store is closed")
            idle = self._idle[address]
            if idle:
                return idle.pop()
        return RedisConnection(address, self._login, deadline)

    def _give_back(self, connection: RedisConnection) -> None:
        with self._lock:
            idle = self._idle[connection.address]
            if not self._is_closed and len(idle) < _MAX_IDLE:
                idle.append(connection)
                return
        connection.close()

    def _drop_idle(self, address: Address) -> None:
        with self._lock:
            stale = self._idle.pop(address, [])
        for connection in stale:
            connection.close()

    # ---- who has what ---------------------------------------------------------------------------

    def _owner(self, key: bytes) -> Address:
        slots = self._slots
        if slots is None:
            return self._first
        named = key.partition(b"{")[2].partition(b"}")[0] or key
        return slots[binascii.crc_hqx(named, 0) % _NUM_SLOTS]

    def _looked_around(self, deadline: float) -> bool:
        try:
            self._look_around(deadline)
        except (OSError, StoreError, ProtocolError):
            return False
        return True

    def _look_around(self, deadline: float) -> None:
        """Of whoever answers first of those that are known, the silent last."""
        with self._lock:
            silent = set(self._silent)
        known = list(dict.fromkeys([*self.addresses, self._first]))
        known.sort(key=silent.__contains__)
        for place, address in enumerate(known):
            now_s = time.monotonic()  # who comes next, if this one says nothing, needs time too
            until = now_s + (deadline - now_s) / (len(known) - place)
            try:
                answer = self.ask_node(address, (b"CLUSTER", b"SLOTS"), until)
            except ServerError as error:
                if error.code == "NOAUTH" or is_full(error):
                    raise turned_away(address, error) from None
                return  # it is in no cluster, or does not say
            except (OSError, StoreError, ProtocolError):
                if place == len(known) - 1:
                    raise
                continue
            slots = _slots(answer, address)
            if slots is not None:
                self._slots = slots
            with self._lock:
                self._silent -= silent
                gone = set(self._idle).difference(self.addresses)
            for each in gone:  # nobody would ask it again, nor notice that it has hung up
                self._drop_idle(each)
            return


def _slots(answer: RedisAnswer, told_by: Address) -> list[Address] | None:
    """None: nothing is assigned. Raises ProtocolError."""
    slots: list[Address | None] = [None] * _NUM_SLOTS
    try:
        for first, last, (host, port, *more), *_ in answer or ():
            address = Address(_host(host, more) or told_by.host, int(port))
            for slot in range(first, last + 1):
                slots[slot] = address
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ProtocolError("what it says of its cluster is not what Redis says") from error
    found = next((address for address in slots if address is not None), None)
    return None if found is None else [address or found for address in slots]


def _host(named: bytes | None, more: Sequence[Any]) -> str:
    """Of a node; empty: the one that was asked. `?`: it goes by a name that it does not have."""
    if named != b"?":
        return named.decode() if named else ""
    said = next((list(each) for each in more if isinstance(each, list)), [])
    return said[said.index(b"ip") + 1].decode() if b"ip" in said else ""


def _is_stale(answer: Any) -> bool:
    """Who has what has changed, or is being changed."""
    return isinstance(answer, ServerError) and answer.code in ("MOVED", "CLUSTERDOWN", "TRYAGAIN")


def _takes_no_writes(answer: Any) -> bool:
    return isinstance(answer, ServerError) and answer.code == "READONLY"


def _elsewhere(answer: Any, told_by: Address) -> _Elsewhere | None:
    """Of `MOVED slot host:port` and `ASK slot host:port`; no host: the same; `?`: whoever has the
    slot by now knows."""
    if not isinstance(answer, ServerError) or answer.code not in ("MOVED", "ASK"):
        return None
    host, _, port = str(answer).rpartition(" ")[2].rpartition(":")
    if not port.isdecimal() or host == "?":
        return None
    return _Elsewhere(Address(host or told_by.host, int(port)), answer.code == "ASK")


def _fail(answers: list[Any], indices: Iterable[int], error: RedisFailure) -> None:
    for index in indices:
        answers[index] = error
