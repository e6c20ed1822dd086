"""RESP, what Redis and Valkey speak: commands to bytes, bytes to answers.

Large values are never assembled: a command is a list of buffers, and an answer's bytes go straight
to where the reader wants them. Knows no sockets: whoever has bytes gives a `ReplySource`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

WireBuffer = bytes | memoryview
RedisAnswer = Any
"""int, bytes, None, ServerError, or a list of these."""

_LINE_BYTES = 64 << 10
"""No line of an answer is longer."""
_MAX_DEPTH = 8
_MAX_ITEMS = 1 << 20


class ServerError(Exception):
    """The server understood and says no. `code` is its first word, such as OOM or MOVED."""

    @property
    def code(self) -> str:
        return str(self).partition(" ")[0]


class ProtocolError(Exception):
    """Not what a Redis server says: nothing that follows can be understood."""


class ReplySource(Protocol):
    def line(self, limit: int) -> bytes:
        """Up to the next CR LF, without it."""

    def fill(self, target: memoryview) -> None:
        """All of `target`."""

    def skip(self, num_bytes: int) -> None: ...


def command(*words: bytes) -> list[WireBuffer]:
    """One command, of small words."""
    return [b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(w), w) for w in words])]


def set_command(
    key: bytes, parts: Sequence[memoryview], *, unless_there: bool = False
) -> list[WireBuffer]:
    """SET of a value that lies in several places. `unless_there`: where there is one already it
    stays, and the answer is None."""
    size = sum(map(len, parts))
    words, end = (4, b"\r\n$2\r\nNX\r\n") if unless_there else (3, b"\r\n")
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, size)
    return [head, *parts, end]


def read_answer(source: ReplySource, depth: int = 0) -> RedisAnswer:
    """Raises ProtocolError. What the server refuses is returned, so that the answers behind it can
    be read."""
    line = source.line(_LINE_BYTES)
    kind, rest = line[:1], line[1:]
    if kind == b"+":
        return rest
    if kind == b"-":
        return ServerError(rest.decode("utf-8", "replace"))
    if kind == b":":
        return _number(rest)
    if kind == b"$":
        return _bulk(source, _number(rest))
    if kind == b"*" and depth < _MAX_DEPTH:
        count = _number(rest)
        if count > _MAX_ITEMS:
            raise ProtocolError("an answer of too many parts")
        return None if count < 0 else [read_answer(source, depth + 1) for _ in range(count)]
    raise ProtocolError("this is not a Redis server, or it is one that speaks otherwise")


def read_into(source: ReplySource, targets: Sequence[memoryview]) -> int | ServerError:
    """A value straight into `targets`, one behind the other. Returns its size, -1 if there is none;
    what there is no room for is skipped."""
    line = source.line(_LINE_BYTES)
    if line[:1] == b"-":
        return ServerError(line[1:].decode("utf-8", "replace"))
    if line[:1] != b"$":
        raise ProtocolError("a value was asked for, and something else was answered")
    size = _number(line[1:])
    if size < 0:
        return size
    left = size
    for target in targets:
        source.fill(target[:left])
        left = max(0, left - target.nbytes)
    source.skip(left)
    _end_of_value(source)
    return size


def _bulk(source: ReplySource, size: int) -> bytes | None:
    if size < 0:
        return None
    if size > _MAX_ITEMS:
        raise ProtocolError("an answer larger than was asked for")
    value = bytearray(size)
    source.fill(memoryview(value))
    _end_of_value(source)
    return bytes(value)


def _end_of_value(source: ReplySource) -> None:
    if source.line(_LINE_BYTES):
        raise ProtocolError("a value that is longer than was said")


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ProtocolError("a number was expected") from error
