"""Packing pages: fewer bytes in the store for work of this processor. Lossless; off by default.

Bytes of one significance are put next to each other (all high bytes of the numbers, then all low
ones) and packed by themselves: exponents repeat and compress, mantissas do not and stay as they
are. A packed page:

    [0, 4 · planes)   length of each
    the rest          planes, one after the other; one of full length is as it was

Knows bytes only; which codec packed a page, and how, stands in its header (codec.py).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.errors import StoreURLError

STRIDES = (1, 2, 4)
"""Widths of the numbers in a page, in bytes: which one it is shows in what packs best."""

_WORTH_IT = 0.95
"""Of its length a plane must have at most, packed: else it stays as it is."""

Compress = Callable[[memoryview], bytes]


class PackKind(enum.StrEnum):
    NONE = "none"
    ZSTD = "zstd"
    LZ4 = "lz4"


class Packing(NamedTuple):
    """How a page was packed."""

    kind: PackKind
    stride: int
    packed_bytes: int


def _zstd() -> tuple[Compress, Callable[[memoryview, int], bytes]]:
    import zstandard

    def compress(data: memoryview) -> bytes:
        return bytes(zstandard.ZstdCompressor(level=1).compress(data))

    def restore(data: memoryview, size: int) -> bytes:
        return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=size))

    return compress, restore


def _lz4() -> tuple[Compress, Callable[[memoryview, int], bytes]]:
    import lz4.block

    def compress(data: memoryview) -> bytes:
        return bytes(lz4.block.compress(data, store_size=False))

    def restore(data: memoryview, size: int) -> bytes:
        return bytes(lz4.block.decompress(data, uncompressed_size=size))

    return compress, restore


_CODECS = {PackKind.ZSTD: _zstd, PackKind.LZ4: _lz4}


class Packer:
    """Of one kind. Thread-safe: it keeps nothing but the width that packed best."""

    def __init__(self, kind: PackKind) -> None:
        """Raises StoreURLError when its package is not there."""
        self._kind = kind
        try:
            self._compress, _ = _CODECS[kind]()
        except ImportError as error:
            raise StoreURLError(
                f"codec {kind.value} needs a package ({error}): pip install quire[codecs]"
            ) from error
        self._stride: int | None = None

    def pack(self, page: memoryview, into: memoryview) -> Packing | None:
        """Into the beginning of `into`; None: it would not become smaller than `into`."""
        if self._stride is None:
            self._stride = min(STRIDES, key=lambda stride: len(self._packed(page, stride)))
        packed = self._packed(page, self._stride)
        if len(packed) > into.nbytes:
            return None
        into[: len(packed)] = packed
        return Packing(self._kind, self._stride, len(packed))

    def _packed(self, page: memoryview, stride: int) -> bytes:
        numbers = np.frombuffer(page, dtype=np.uint8).reshape(-1, stride)
        planes = []
        for index in range(stride):
            plane = np.ascontiguousarray(numbers[:, index]).data
            packed = self._compress(plane)
            planes.append(packed if len(packed) < _WORTH_IT * plane.nbytes else plane)
        return b"".join([struct.pack(f"<{stride}I", *map(len, planes)), *planes])


def can_unpack(kind: PackKind) -> bool:
    """Is what it takes installed? Who writes may have more than who reads."""
    if kind not in _CODECS:
        return False
    try:
        _CODECS[kind]()
    except ImportError:
        return False
    return True


def unpack(packing: Packing, packed: memoryview, page: memoryview) -> bool:
    """`packed` may be the beginning of `page` itself. False: these are not the bytes of a page of
    that size, or what unpacks them is not installed."""
    stride = packing.stride
    if stride not in STRIDES or page.nbytes % stride or packing.kind is PackKind.NONE:
        return False
    size = page.nbytes // stride
    try:
        _, restore = _CODECS[packing.kind]()
        # A copy: the page is written over what it is made from.
        data = memoryview(bytes(packed[: packing.packed_bytes]))
        planes: list[memoryview | bytes] = []
        at = 4 * stride
        for length in struct.unpack_from(f"<{stride}I", data):
            found = data[at : at + length]
            planes.append(found if length == size else restore(found, size))
            at += length
    except Exception:  # the boundary to a decompressor that was given damaged bytes
        return False
    if any(len(plane) != size for plane in planes):
        return False
    numbers = np.frombuffer(page, dtype=np.uint8).reshape(-1, stride)
    for index, plane in enumerate(planes):
        numbers[:, index] = np.frombuffer(plane, dtype=np.uint8)
    return True
