"""RedisConnection: one line to one server, on which every call has a deadline.

A call that fails half-way leaves answers behind that nobody waits for: the connection is of no use
any more, and is closed by whoever had it. Knows sockets and TLS; nothing of keys.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from quire.errors import StoreError
from quire.store.redis.wire import (
    ProtocolError,
    RedisAnswer,
    ServerError,
    WireBuffer,
    command,
    read_answer,
    read_into,
)

_BUFFER_BYTES = 64 << 10
_IOV_MAX = 512
"""Buffers of one call to the kernel, which takes 1,024."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @property
    def text(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """What every connection begins with. Never shown."""

    user: str = ""
    password: str = ""
    database: int = 0
    tls: ssl.SSLContext | None = None

    def commands(self) -> dict[str, list[WireBuffer]]:
        """By what each is for, see turned_away()."""
        said = {}
        if self.user or self.password:
            words = [self.user, self.password] if self.user else [self.password]
            said["user"] = command(b"AUTH", *(w.encode(errors="surrogateescape") for w in words))
        if self.database:
            said["database"] = command(b"SELECT", b"%d" % self.database)
        return said


_SMALL_BYTES = 64 << 10
"""More is not put together, nor waited for."""
_KEEP_ALIVE_S = 60
"""Quiet connections give a sign of life so often: some firewalls forget them after minutes."""
_NEAR_BYTES = 512 << 10
"""On their way to a server on this machine, which the kernel doubles: so few that they are still in
a cache when the server reads them. Measured with pages of 2 MiB: 162 ms for a GiB, not 235."""


class RedisConnection:
    def __init__(self, address: Address, login: Login, deadline: float) -> None:
        """Raises OSError, StoreError: the server turns us away."""
        self.address = address
        self._deadline = deadline
        self._socket = _connect(address, login, deadline)
        self._can_gather = login.tls is None
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._at = self._end = 0
        self.is_used = False
        """Something was answered on it before: it may have died since."""
        try:
            opening = login.commands()
            self.send(chain.from_iterable(opening.values()), deadline)
            for what in opening:
                answer = self.answer()
                if isinstance(answer, ServerError):
                    raise turned_away(address, answer, what)
        except BaseException:
            self.close()
            raise

    def send(self, buffers: Iterable[WireBuffer], deadline: float) -> None:
        """All of it, and what is large when it has come to it; answers that follow have the same
        deadline. Raises OSError."""
        self._deadline = deadline
        small: list[WireBuffer] = []
        size = 0
        for buffer in buffers:
            small.append(buffer)
            size += len(buffer)
            if size > _SMALL_BYTES:
                self._send_now(small, size)
                small, size = [], 0
        if small:  # hundreds of small commands: one is cheaper
            self._send_now([b"".join(small)], size)

    def _send_now(self, buffers: Sequence[WireBuffer], size: int) -> None:
        while True:
            self._wait()
            if self._can_gather:
                sent = self._socket.sendmsg(buffers[:_IOV_MAX])
            else:  # not sendall(), which gives each of its records as much time as all have
                sent = self._socket.send(buffers[0])
            size -= sent
            if not size:
                return
            buffers = _behind(buffers, sent)

    def answer(self) -> RedisAnswer:
        """Raises OSError, ProtocolError."""
        return read_answer(self)

    def answer_into(self, targets: Sequence[memoryview]) -> int | ServerError:
        """See wire.read_into. Raises OSError, ProtocolError."""
        return read_into(self, targets)

    def close(self) -> None:
        self._socket.close()

    # ---- as a Source ----------------------------------------------------------------------------

    def line(self, limit: int) -> bytes:
        found = bytearray()
        while True:
            if self._at == self._end:
                self._more()
            end = self._bytes.find(b"\n", self._at, self._end) + 1
            found += self._buffer[self._at : end or self._end]
            self._at = end or self._end
            if end:
                break
            if len(found) > limit:
                raise ProtocolError("a line without an end")
        if not found.endswith(b"\r\n"):
            raise ProtocolError("a line that does not end as lines do")
        return bytes(found[:-2])

    def fill(self, target: memoryview) -> None:
        have = min(target.nbytes, self._end - self._at)
        target[:have] = self._buffer[self._at : self._at + have]
        self._at += have
        while have < target.nbytes:
            self._wait()
            count = self._socket.recv_into(target[have:])
            if not count:
                raise ConnectionResetError("the server has closed the connection")
            have += count

    def skip(self, num_bytes: int) -> None:
        while num_bytes:
            if self._at == self._end:
                self._more()
            count = min(num_bytes, self._end - self._at)
            self._at += count
            num_bytes -= count

    def _more(self) -> None:
        self._wait()
        self._at, self._end = 0, self._socket.recv_into(self._buffer)
        if not self._end:
            raise ConnectionResetError("the server has closed the connection")
        self.is_used = True

    def _wait(self) -> None:
        self._socket.settimeout(_left_s(self._deadline))


def _behind(buffers: Sequence[WireBuffer], sent: int) -> list[WireBuffer]:
    """What is left of them when so many bytes are sent."""
    for done, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[done + 1 :]]
        sent -= len(buffer)
    return []


_WRONG = {
    "user": "refuses our user and password ({code}): check both in the store's URL, or leave out "
    "what the server does not ask for",
    "database": "does not give us our database ({code}): give another number behind the host in "
    "the store's URL, or none",
}


def is_full(answer: ServerError) -> bool:
    """Of clients: whatever was asked, the server says so and hangs up."""
    return "max number of clients" in str(answer)


def turned_away(address: Address, answer: ServerError, what: str = "") -> StoreError:
    """`what` it refused, of what a connection begins with; empty: anything else."""
    if answer.code == "NOAUTH":
        why = "asks for a password ({code}): write redis://user:password@host as the store's URL"
    elif is_full(answer):
        why = "takes no more clients ({code}): raise its maxclients, or end some of them"
    elif answer.code == "NOPERM" and not what:
        why = (
            "does not let this user read our keys ({code}): give it the right to, or check user "
            "and prefix in the store's URL"
        )
    else:
        why = _WRONG.get(what, "turns us away ({code}): check the store's URL")
    return StoreError(f"{address.text} {why.format(code=answer.code)}")


def _connect(address: Address, login: Login, deadline: float) -> socket.socket:
    plain = _reach(address, deadline)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S)
        if plain.getpeername()[0] == plain.getsockname()[0]:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BYTES)
        if login.tls is None:
            return plain
        plain.settimeout(_left_s(deadline))
        return login.tls.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise


def _reach(address: Address, deadline: float) -> socket.socket:
    """The first that answers of all that the name leads to: who comes next, if one says nothing,
    needs time too."""
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (ValueError, OverflowError) as error:  # of a name that is none, a port that cannot be
        raise OSError(f"{address.text!r} is no address") from error
    for left, (family, kind, protocol, _, where) in zip(
        range(len(places), 0, -1), places, strict=True
    ):
        line = socket.socket(family, kind, protocol)
        try:
            line.settimeout(_left_s(deadline) / left)
            line.connect(where)
            return line
        except OSError:
            line.close()
            if left == 1:
                raise
    raise OSError(f"{address.text!r} leads nowhere")


def _left_s(deadline: float) -> float:
    """Raises TimeoutError: nothing."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
