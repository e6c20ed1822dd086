"""Looking after a store by hand: list, verify, clear. Returns data; printing is the CLI's.

Opens what is there and creates nothing. Knows no model: a page is verified against its own header
and its name, since only the model's owner could say which fingerprint is right.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import reduce

from quire.errors import StoreError
from quire.store.base import HEADER_BYTES, Blob, Part, Store, StoredObject
from quire.store.codec import (
    Header,
    Mismatch,
    check,
    check_header,
    check_packed,
    open_header,
    unpack_in_place,
)
from quire.store.opening import is_only_read, without_page_options
from quire.store.url import open_store, redact, split_urls
from quire.types import PageStatus

MAX_OBJECT_BYTES = 1 << 30
"""No page is that large; a larger file under an object's name is not one of ours."""

_READ_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    num_objects: int = 0
    num_bytes: int = 0
    num_ok: int = 0
    num_gone: int = 0
    """Evicted by somebody between listing and reading."""
    num_unreadable: int = 0
    """The store failed to read them; nothing is known about their content."""
    mismatches: dict[Mismatch, int] = field(default_factory=dict)
    num_quarantined: int = 0
    fingerprints: dict[str, int] = field(default_factory=dict)
    """Good pages per model and layout, by the first digits of its fingerprint. A cache reads those
    of its own fingerprint and leaves the others alone."""

    @property
    def is_clean(self) -> bool:
        return not self.mismatches and not self.num_unreadable

    def __add__(self, other: VerifyReport) -> VerifyReport:
        """Of two stores together."""
        return VerifyReport(
            num_objects=self.num_objects + other.num_objects,
            num_bytes=self.num_bytes + other.num_bytes,
            num_ok=self.num_ok + other.num_ok,
            num_gone=self.num_gone + other.num_gone,
            num_unreadable=self.num_unreadable + other.num_unreadable,
            mismatches=dict(Counter(self.mismatches) + Counter(other.mismatches)),
            num_quarantined=self.num_quarantined + other.num_quarantined,
            fingerprints=dict(Counter(self.fingerprints) + Counter(other.fingerprints)),
        )


@contextmanager
def opened(url: str, *, must_exist: bool = True) -> Iterator[Store]:
    """Closed afterwards; a server or disk that fails meanwhile is a StoreError, in a sentence."""
    try:
        with closing(open_store(url, must_exist=must_exist)) as store:
            yield store
    except OSError as error:
        reason = str(error) or "no answer in time"
        raise StoreError(
            f"{redact(url)} fails ({reason}): look at its server or disk, and try again"
        ) from None


def list_objects(url: str, *, to_clear: bool = False) -> Iterator[StoredObject]:
    """Every object, in no particular order; or what clear() would remove. Raises StoreError."""
    for each in _stores(url, to_clear=to_clear):
        with opened(each) as store:
            yield from store.scan()


def clear(url: str) -> int:
    """Remove every object of stores that are not only read; returns how many. Raises StoreError."""
    removed = 0
    for each in _stores(url, to_clear=True):
        with opened(each) as store:
            removed += store.clear(wait=True)
    return removed


def verify(
    url: str,
    *,
    quarantine: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """Read and check every object. `progress(done, total)` after each. Raises StoreError.

    Damaged objects are moved away only if `quarantine`; those of another version never.
    """
    reports = [_verify(each, quarantine=quarantine, progress=progress) for each in _stores(url)]
    return reduce(VerifyReport.__add__, reports)


def _stores(text: str, *, to_clear: bool = False) -> list[str]:
    """Each by itself, and as the store itself wants its URL."""
    urls = [url for url in split_urls(text) if not (to_clear and is_only_read(url))]
    return [without_page_options(url) for url in urls]


def _verify(url: str, *, quarantine: bool, progress: Callable[[int, int], None]) -> VerifyReport:
    with opened(url) as store:
        objects = sorted(store.scan(), key=lambda item: item.size_bytes)
        counts: Counter[PageStatus | Mismatch] = Counter()
        fingerprints: Counter[str] = Counter()
        num_quarantined = 0
        largest = max((o.size_bytes for o in objects if _is_ours(o)), default=HEADER_BYTES)
        view = memoryview(mmap.mmap(-1, largest))
        for i, item in enumerate(objects):
            outcome = _verify_one(store, item, view, time.monotonic() + _READ_TIMEOUT_S)
            counts[outcome] += 1
            if outcome is PageStatus.OK:
                fingerprints[_fingerprint(view)] += 1
            if quarantine and isinstance(outcome, Mismatch) and not outcome.is_foreign:
                store.quarantine(item.name)
                num_quarantined += 1
            progress(i + 1, len(objects))
    return VerifyReport(
        num_objects=len(objects),
        num_bytes=sum(item.size_bytes for item in objects),
        num_ok=counts[PageStatus.OK],
        num_gone=counts[PageStatus.MISS],
        num_unreadable=counts[PageStatus.FAILED],
        mismatches={why: n for why, n in counts.items() if isinstance(why, Mismatch)},
        num_quarantined=num_quarantined,
        fingerprints=dict(fingerprints),
    )


def _fingerprint(header: memoryview) -> str:
    """Short name of the fingerprint in a header that has just been checked."""
    opened = open_header(header[:HEADER_BYTES])
    assert not isinstance(opened, Mismatch)
    return opened.part.fingerprint.hex()[:12]


def _is_ours(item: StoredObject) -> bool:
    return HEADER_BYTES < item.size_bytes <= MAX_OBJECT_BYTES


def _verify_one(
    store: Store, item: StoredObject, view: memoryview, deadline: float
) -> PageStatus | Mismatch:
    if not _is_ours(item):
        return Mismatch.LENGTH
    blob = Blob(view[:HEADER_BYTES], view[HEADER_BYTES : item.size_bytes])
    (status,) = store.get([item.name], [blob], deadline=deadline)
    if status is PageStatus.CORRUPT:
        return Mismatch.LENGTH
    if status is not PageStatus.OK:
        return status if status is PageStatus.MISS else PageStatus.FAILED
    header = open_header(blob.header)
    if isinstance(header, Mismatch):
        return header
    key, component, shard, num_shards = item.name
    if header.packing is not None:
        return _verify_packed(item, header, blob)
    part = Part(component, shard, num_shards, header.part.fingerprint, blob.payload.nbytes)
    return check(part, key, blob.header, blob.payload) or PageStatus.OK


def _verify_packed(item: StoredObject, header: Header, blob: Blob) -> PageStatus | Mismatch:
    key, component, shard, num_shards = item.name
    page_bytes = header.part.page_bytes
    if not blob.payload.nbytes <= page_bytes <= MAX_OBJECT_BYTES:
        return Mismatch.LENGTH
    part = Part(component, shard, num_shards, header.part.fingerprint, page_bytes)
    page = memoryview(bytearray(page_bytes))
    page[: blob.payload.nbytes] = blob.payload
    if not unpack_in_place(part, key, blob.header, page):
        return check_header(part, key, blob.header) or Mismatch.CHECKSUM
    return check_packed(part, key, blob.header, page) or PageStatus.OK
