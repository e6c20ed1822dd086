"""The page codec: the header in front of every stored page, sealed on write, checked on read.

Knows bytes only: no files, no stores, no statuses. Layout, little-endian:

    [0, 8)       magic                      ┐ these three keep their place in every
    [8, 12)      format version             │ future version, so that an older reader can
    [4080, 4096) xxh3-128 of [0, 4080)      ┘ tell "newer than me" from "damaged"
    [16, 48)     fingerprint: whose bytes these are
    [48, 80)     page key
    [80, 112)    component, UTF-8, zero-padded
    [112, 120)   shard, num_shards
    [120, 128)   payload length
    [128, 144)   xxh3-128 of the payload
    the rest     zero

A header is evidence to compare with what the reader asked for, never a source of lengths: the
reader knows how long the page must be, and a header that disagrees is a mismatch.
xxh3 guards against accident (torn writes, bit rot, mix-ups), not against an attacker who can
write into the store.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import xxhash

from quire.store.base import HEADER_BYTES, ObjectName, Part
from quire.types import PAGE_KEY_BYTES, PageKey

MAGIC = b"QUIREPG\n"
FORMAT_VERSION = 1
MAX_COMPONENT_BYTES = 32

_IDENTITY = struct.Struct("<8sI4x32s32s32sIIQ")
_SEAL_AT = HEADER_BYTES - 16


class Mismatch(enum.StrEnum):
    """Why bytes that came back are not the page that was asked for."""

    MAGIC = "magic"
    HEADER = "header_checksum"
    VERSION = "version"
    FINGERPRINT = "fingerprint"
    KEY = "key"
    COMPONENT = "component"
    LENGTH = "length"
    CHECKSUM = "checksum"

    @property
    def is_foreign(self) -> bool:
        """An intact page that belongs to another version or model: a miss, left for its owner."""
        return self in (Mismatch.VERSION, Mismatch.FINGERPRINT)


class Header(NamedTuple):
    """What an undamaged header says of its page."""

    part: Part
    key: PageKey


def object_name(part: Part, key: PageKey) -> ObjectName:
    return ObjectName(key, part.component, part.shard, part.num_shards)


def _expected(part: Part, key: PageKey, payload: memoryview) -> bytes:
    """The header of this payload, all of it."""
    identity = _IDENTITY.pack(
        MAGIC,
        FORMAT_VERSION,
        part.fingerprint,
        key,
        part.component.encode(),
        part.shard,
        part.num_shards,
        payload.nbytes,
    )
    content = (identity + xxhash.xxh3_128_digest(payload)).ljust(_SEAL_AT, b"\0")
    return content + xxhash.xxh3_128_digest(content)


def seal(part: Part, key: PageKey, payload: memoryview, header: memoryview) -> None:
    """Write into `header` (HEADER_BYTES, any old content) the header of this payload."""
    if len(part.component.encode()) > MAX_COMPONENT_BYTES or len(key) != PAGE_KEY_BYTES:
        raise ValueError(f"component {part.component!r} or key {key.hex()} does not fit a header")
    header[:] = _expected(part, key, payload)


def open_header(header: memoryview) -> Header | Mismatch:
    """Parse a header that proves to be undamaged and of our version."""
    magic, version, fingerprint, key, component, shard, num_shards, length = _IDENTITY.unpack_from(
        header
    )
    if magic != MAGIC:
        return Mismatch.MAGIC
    if header[_SEAL_AT:] != xxhash.xxh3_128_digest(header[:_SEAL_AT]):
        return Mismatch.HEADER
    if version != FORMAT_VERSION:
        return Mismatch.VERSION
    text = component.rstrip(b"\0").decode(errors="replace")
    return Header(Part(text, shard, num_shards, fingerprint, length), PageKey(key))


def check_header(part: Part, key: PageKey, header: memoryview) -> Mismatch | None:
    """None when it is the header of this very page."""
    found = open_header(header)
    if isinstance(found, Mismatch):
        return found
    if found.part.fingerprint != part.fingerprint:
        return Mismatch.FINGERPRINT
    if found.key != key:
        return Mismatch.KEY
    if object_name(found.part, key) != object_name(part, key):
        return Mismatch.COMPONENT
    return None if found.part.page_bytes == part.page_bytes else Mismatch.LENGTH


def check(part: Part, key: PageKey, header: memoryview, payload: memoryview) -> Mismatch | None:
    """None when header and payload are exactly the page asked for."""
    # A header has exactly one right value: only when it differs is it taken apart.
    if payload.nbytes == part.page_bytes and header.tobytes() == _expected(part, key, payload):
        return None
    wrong = Mismatch.LENGTH if payload.nbytes != part.page_bytes else Mismatch.CHECKSUM
    return check_header(part, key, header) or wrong
