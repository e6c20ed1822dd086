"""Identity types and small enums shared by every layer. Knows nothing but the vocabulary.

`PageIds` is the one representation of a list of pool pages: little-endian int32, as immutable
bytes. Slicing is page arithmetic times four, joining a path is `b"".join`, a numpy view is
`np.frombuffer`, the wire format is the value itself, and nobody can alias and mutate it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt

PageKey = NewType("PageKey", bytes)
"""32-byte digest naming one page's content by its whole prefix."""

PageIds = NewType("PageIds", bytes)
"""Pool page numbers, int32 little-endian, concatenated."""

Clock = Callable[[], float]
"""Seconds since whenever; only differences mean anything."""

OperationId = NewType("OperationId", int)
RequestId = NewType("RequestId", str)

PAGE_KEY_BYTES = 32
PAGE_ID_BYTES = 4
NO_PARENT = PageKey(bytes(PAGE_KEY_BYTES))
"""In place of the key of the page before: none, this is the first."""
NO_PAGES = PageIds(b"")
NO_SLOT = -1
"""In place of a page number: none."""


class Tier(enum.IntEnum):
    """Tiers whose pages the leader allocates. L3 is not a pool: it holds pages by key."""

    DEVICE = 0
    HOST = 1


class Residency(enum.IntEnum):
    """State of one (node, component, tier).

    ABSENT → FILLING → READY → (DRAINING →) ABSENT. Only READY bytes may be read or promised.
    DRAINING pages are condemned but still referenced; they are freed with the last reference.
    """

    ABSENT = 0
    FILLING = 1
    READY = 2
    DRAINING = 3


# Members by a plain name: looking one up on its class costs a tenth of a microsecond, which the
# metadata path would pay dozens of times per request.
# Tiers are plain numbers, which also index faster than members do.
DEVICE, HOST = int(Tier.DEVICE), int(Tier.HOST)
FILLING, READY, DRAINING = Residency.FILLING, Residency.READY, Residency.DRAINING


class PageStatus(enum.IntEnum):
    """Outcome of one page of one operation, one byte on the wire. Larger is worse."""

    OK = 0
    MISS = 1
    CORRUPT = 2
    """Bytes came back but header or checksum did not fit; quarantined, a miss for the reader."""
    FAILED = 3
    TIMEOUT = 4
    CANCELLED = 5
    REJECTED = 6
    """The store would not take it: full, read-only, or its circuit breaker is open."""
    ORPHAN = 7
    """Not written: the store lacks the page before it. Write that first."""


def page_ids(pages: Iterable[int] | npt.NDArray[np.int32]) -> PageIds:
    return PageIds(np.asarray(pages, dtype="<i4").tobytes())


def page_array(pages: PageIds) -> npt.NDArray[np.int32]:
    """Read-only int32 view, no copy."""
    return np.frombuffer(pages, dtype="<i4")


def num_pages(pages: PageIds) -> int:
    return len(pages) >> 2


def split_keys(keys: bytes) -> list[PageKey]:
    """Concatenated page keys → list."""
    return [PageKey(keys[i : i + PAGE_KEY_BYTES]) for i in range(0, len(keys), PAGE_KEY_BYTES)]


class Owner(NamedTuple):
    """Whose pages these are, in a store that accounts for it."""

    name: str
    """Hex digits that follow from the tenant's name."""
    share: float
    """Of the store's budget, what they may be."""


TENANT_MARK = "\x1f"
"""In a salt: what stands before it is the tenant, what follows one of the salts of that tenant."""


def tenant_of(salt: str) -> str:
    """Who shares a quota and takes turns as one: those with the same salt, or a tenant with several
    of them. No tenant of the first kind is one of the second. Empty: nobody's."""
    head, mark, _ = salt.partition(TENANT_MARK)
    return head + mark
