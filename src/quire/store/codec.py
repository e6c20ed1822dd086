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
    [144, 160)   version 2 only, a page that is packed: with what, width of its numbers, and how
                 many bytes it has in the store; all above is said of the page as it was
    the rest     zero

A page that is not packed is of version 1, and always will be: who cannot unpack can still read it.

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
from quire.store.packing import Packing, PackKind, can_unpack, unpack
from quire.types import PAGE_KEY_BYTES, PageKey

MAGIC = b"QUIREPG\n"
FORMAT_VERSION = 1
PACKED_VERSION = 2
MAX_COMPONENT_BYTES = 32

_IDENTITY = struct.Struct("<8sI4x32s32s32sIIQ")
_PACKING = struct.Struct("<8sII")
_PACKING_AT = _IDENTITY.size + 16
_SEAL_AT = HEADER_BYTES - 16


class Mismatch(enum.StrEnum):
    """Why bytes that came back are not the page that was asked for."""

    MAGIC = "magic"
    HEADER = "header_checksum"
    VERSION = "version"
    CODEC = "codec"
    FINGERPRINT = "fingerprint"
    KEY = "key"
    COMPONENT = "component"
    LENGTH = "length"
    CHECKSUM = "checksum"

    @property
    def is_foreign(self) -> bool:
        """A page that belongs to another version or model, or that only others can unpack: a miss,
        left for its owner."""
        return self in (Mismatch.VERSION, Mismatch.CODEC, Mismatch.FINGERPRINT)


class Header(NamedTuple):
    """What an undamaged header says of its page."""

    part: Part
    key: PageKey
    packing: Packing | None = None


def object_name(part: Part, key: PageKey) -> ObjectName:
    return ObjectName(key, part.component, part.shard, part.num_shards)


def _expected(
    part: Part, key: PageKey, payload: memoryview, packing: Packing | None = None
) -> bytes:
    """The header of this payload, all of it."""
    identity = _IDENTITY.pack(
        MAGIC,
        FORMAT_VERSION if packing is None else PACKED_VERSION,
        part.fingerprint,
        key,
        part.component.encode(),
        part.shard,
        part.num_shards,
        payload.nbytes,
    )
    content = identity + xxhash.xxh3_128_digest(payload)
    if packing is not None:
        content += _PACKING.pack(packing.kind.encode(), packing.stride, packing.packed_bytes)
    content = content.ljust(_SEAL_AT, b"\0")
    return content + xxhash.xxh3_128_digest(content)


def seal(
    part: Part,
    key: PageKey,
    payload: memoryview,
    header: memoryview,
    packing: Packing | None = None,
) -> None:
    """Write into `header` (HEADER_BYTES, any old content) the header of this payload, which is
    stored as it is, or packed."""
    if len(part.component.encode()) > MAX_COMPONENT_BYTES or len(key) != PAGE_KEY_BYTES:
        raise ValueError(f"component {part.component!r} or key {key.hex()} does not fit a header")
    header[:] = _expected(part, key, payload, packing)


def open_header(header: memoryview) -> Header | Mismatch:
    """Parse a header that proves to be undamaged, of a version that we know, and of a page that we
    can unpack if it is packed."""
    magic, version, fingerprint, key, component, shard, num_shards, length = _IDENTITY.unpack_from(
        header
    )
    if magic != MAGIC:
        return Mismatch.MAGIC
    if header[_SEAL_AT:] != xxhash.xxh3_128_digest(header[:_SEAL_AT]):
        return Mismatch.HEADER
    packing = None
    if version == PACKED_VERSION:
        packing = _packing(header)
    if version != FORMAT_VERSION and packing is None:
        return Mismatch.VERSION
    if packing is not None and not can_unpack(packing.kind):
        return Mismatch.CODEC
    text = component.rstrip(b"\0").decode(errors="replace")
    return Header(Part(text, shard, num_shards, fingerprint, length), PageKey(key), packing)


def _packing(header: memoryview) -> Packing | None:
    """None: packed with something that we do not know."""
    kind, stride, packed_bytes = _PACKING.unpack_from(header, _PACKING_AT)
    try:
        return Packing(
            PackKind(kind.rstrip(b"\0").decode("ascii", "replace")), stride, packed_bytes
        )
    except ValueError:
        return None


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


def unpack_in_place(part: Part, key: PageKey, header: memoryview, payload: memoryview) -> bool:
    """If the object is a packed page of this name, and shorter than the page: unpack it, from the
    beginning of `payload` to all of it. check_packed() says whether it is the right one."""
    found = open_header(header)
    if isinstance(found, Mismatch) or found.packing is None:
        return False
    if check_header(part, key, header) or found.packing.packed_bytes > payload.nbytes:
        return False
    return unpack(found.packing, payload, payload)


def check_packed(
    part: Part, key: PageKey, header: memoryview, payload: memoryview
) -> Mismatch | None:
    """Of a page that was unpacked: None when it is exactly the page asked for."""
    found = open_header(header)
    if isinstance(found, Mismatch):
        return found
    right = header.tobytes() == _expected(part, key, payload, found.packing)
    return None if right else check_header(part, key, header) or Mismatch.CHECKSUM
