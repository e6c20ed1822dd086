"""What is said on a connection that carries pages, after the handshake.

    client ──Read──▶ server ──ReadAnswer, then the bytes of pages that are OK, in order──▶ client

or, on one machine (ways/mapped.py), a ReadAnswer that says where they are, and TAKEN both ways.

Reads are answered in the order they were asked in; a client may ask the next before it has the
last. A server that does not understand closes the connection.
"""

from __future__ import annotations

import msgspec
import xxhash

from quire.decoders import msgpack_decoder

MAX_FRAME_BYTES = 64 << 10
MAX_PAGES_PER_READ = 1024
MAX_READ_BYTES = 16 << 20
"""Per read, unless one page is longer; the pages beyond it are rejected."""
CHECKSUM_BYTES = 8
TAKEN = b"taken"
"""A reader has copied the pages of the answer; and the page server, that it was still granted."""
NOT_TO_WHAT_WAS_ASKED = "the peer's answer is not to what was asked"


class Read(msgspec.Struct, frozen=True, array_like=True):
    """Pages [start, start + count) of a grant, heads [first, last) of each."""

    epoch: str
    grant: int
    component: str
    start: int
    count: int
    first_head: int
    last_head: int
    wait_s: float
    """How long the reader can wait for the grant, should it come before it."""
    ticket: bytes
    """Given with the grant."""


class ReadAnswer(msgspec.Struct, frozen=True, array_like=True):
    statuses: bytes
    """A PageStatus per page asked for."""
    page_bytes: int
    """Of each page that follows."""
    checksums: bytes
    """Of each page that follows: xxh3-64, little-endian."""
    places: bytes = b""
    """Of each page that is OK and does not follow: its number in the pool, as 32 bits."""


_encode = msgspec.msgpack.Encoder().encode
_reads = msgpack_decoder(Read)
_answers = msgpack_decoder(ReadAnswer)


def encode(message: Read | ReadAnswer) -> bytes:
    return _encode(message)


def decode_read(data: bytes) -> Read:
    """Raises msgspec.DecodeError."""
    return _reads.decode(data)


def decode_answer(data: bytes) -> ReadAnswer:
    """Raises msgspec.DecodeError."""
    return _answers.decode(data)


def checksum(data: memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(CHECKSUM_BYTES, "little")
