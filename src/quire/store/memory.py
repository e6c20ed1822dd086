"""A store in this process's memory: for tests, demos, and engines that share one process.

`memory://?max=1GiB` is private to whoever opens it; `memory://name` is the same store for
everybody in the process who says the same name, and outlives them.
Byte budget; the least recently used goes first, and nothing before what needs it.
Knows nothing of headers or checksums.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from quire.errors import StoreURLError
from quire.sizes import format_bytes
from quire.store.account import StoreBudget
from quire.store.base import (
    SPARE_SHARE,
    STEP_NS,
    Blob,
    NewObject,
    ObjectName,
    StoredObject,
    StoreStats,
)
from quire.store.url import Options, StoreURL
from quire.types import Owner, PageStatus

DEFAULT_MAX_BYTES = 1 << 30


@dataclass(slots=True)
class _Object:
    data: bytes
    parent: ObjectName | None
    used_ns: int
    owner: str


class MemoryStore:
    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES, *, is_private: bool = False) -> None:
        """`is_private`: nobody can open it again."""
        self.max_bytes = max_bytes
        self._is_private = is_private
        self._lock = threading.Lock()
        self._objects: dict[ObjectName, _Object] = {}
        self._order: list[tuple[int, ObjectName]] = []
        """A heap of (used, name), coldest first; what was used since has another entry."""
        self._used_bytes = 0
        self._owned: Counter[str] = Counter()
        """Bytes by owner."""
        self._num_evicted = 0

    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        with self._lock:
            return [name in self._objects for name in names]

    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        return [self._get_one(name, blob) for name, blob in zip(names, into, strict=True)]

    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        return [self._put_one(new) for new in objects]

    def budget(self) -> StoreBudget:
        return StoreBudget(self._used_bytes, self.max_bytes, is_shared=False)

    def touch(self, names: Sequence[ObjectName], *, used_ns: int, each: bool = False) -> None:
        with self._lock:
            is_there = self._objects.__contains__
            usable = list(filter(is_there, names) if each else takewhile(is_there, names))
            parent = self._objects[usable[0]].parent if usable and not each else None
            if parent is not None:
                if parent not in self._objects:
                    return
                used_ns = min(used_ns, self._objects[parent].used_ns - STEP_NS)
            floor_ns = 0
            for i, name in reversed(list(enumerate(usable))):
                floor_ns = max(self._objects[name].used_ns, used_ns - i * STEP_NS, floor_ns)
                self._use(name, floor_ns)
                floor_ns = 0 if each else floor_ns + STEP_NS

    def quarantine(self, name: ObjectName) -> bool:
        """Memory keeps nothing for a person to look at: the object is dropped."""
        with self._lock:
            there = name in self._objects
            self._drop(name)
        return there

    def scan(self) -> Iterator[StoredObject]:
        with self._lock:
            found = [
                StoredObject(name, len(item.data), item.used_ns / 1e9)
                for name, item in self._objects.items()
            ]
        return iter(found)

    def clear(self, *, wait: bool = False) -> int:
        with self._lock:
            count = len(self._objects)
            for name in list(self._objects):
                self._drop(name)
            return count

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                len(self._objects), self._used_bytes, self.max_bytes, self._num_evicted
            )

    def close(self) -> None:
        """A shared store stays for the others who know its name. The memory of a private one is
        given back now, not when somebody next looks for garbage (see quire.garbage)."""
        if self._is_private:
            self.clear()

    def _get_one(self, name: ObjectName, blob: Blob) -> PageStatus:
        with self._lock:
            item = self._objects.get(name)
        if item is None:
            return PageStatus.MISS
        # The bytes are immutable, so they are copied without the lock.
        view = memoryview(item.data)
        header_bytes = blob.header.nbytes
        if len(view) >= header_bytes:
            blob.header[:] = view[:header_bytes]
        page = view[header_bytes:][: blob.payload.nbytes]
        blob.payload[: len(page)] = page
        is_whole = len(view) == header_bytes + blob.payload.nbytes
        return PageStatus.OK if is_whole else PageStatus.CORRUPT

    def _put_one(self, new: NewObject) -> PageStatus:
        name, parent, used_ns = new.name, new.parent, new.used_ns
        if new.size_bytes > self.max_bytes:
            return PageStatus.REJECTED
        data = b"".join(new.blob)
        with self._lock:
            if name in self._objects:
                return PageStatus.OK
            if new.owner is not None and not self._has_room(new, new.owner):
                return PageStatus.REJECTED
            while self._used_bytes + new.size_bytes > self.max_bytes:
                self._evict()
            if parent is not None:
                if parent not in self._objects:
                    return PageStatus.ORPHAN
                used_ns = min(used_ns, self._objects[parent].used_ns - STEP_NS)
            owner = "" if new.owner is None else new.owner.name
            self._objects[name] = _Object(data, parent, used_ns, owner)
            if owner:
                self._owned[owner] += new.size_bytes
            self._used_bytes += new.size_bytes
            self._use(name, used_ns)
        return PageStatus.OK

    def _has_room(self, new: NewObject, owner: Owner) -> bool:
        """Who has its share makes room among its own: what is colder than what the new one
        needs."""
        most = int(self.max_bytes * owner.share)
        if self._owned[owner.name] + new.size_bytes <= most:
            return True
        above = self._objects.get(new.parent) if new.parent is not None else None
        bound_ns = new.used_ns if above is None else above.used_ns
        own = [
            (item.used_ns, name)
            for name, item in self._objects.items()
            if item.owner == owner.name and item.used_ns < bound_ns
        ]
        wanted = most - most // SPARE_SHARE - new.size_bytes
        for _, name in sorted(own):
            if self._owned[owner.name] <= wanted:
                break
            self._drop(name)
            self._num_evicted += 1
        return self._owned[owner.name] + new.size_bytes <= most

    def _use(self, name: ObjectName, used_ns: int) -> None:
        self._objects[name].used_ns = used_ns
        if len(self._order) > 2 * len(self._objects) + 64:
            self._order = [(item.used_ns, name) for name, item in self._objects.items()]
            heapq.heapify(self._order)
        heapq.heappush(self._order, (used_ns, name))

    def _evict(self) -> None:
        used_ns, name = heapq.heappop(self._order)
        item = self._objects.get(name)
        if item is not None and item.used_ns == used_ns:
            self._drop(name)
            self._num_evicted += 1

    def _drop(self, name: ObjectName) -> None:
        item = self._objects.pop(name, None)
        if item is not None:
            self._used_bytes -= len(item.data)
            if item.owner:
                self._owned[item.owner] -= len(item.data)
                if not self._owned[item.owner]:
                    del self._owned[item.owner]


# The one table that lives as long as the process. Two engines in a process have nothing in
# common but the URL they were given; a name can lead both to the same object only through a
# process-wide table. It stays empty unless somebody opens memory://name, and nothing else in
# the package reads it.
_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def _open_named(name: str, max_bytes: int, url: str) -> MemoryStore:
    """The store of that name, made on first use. Raises if the sizes contradict each other."""
    with _named_lock:
        if name not in _named:
            _named[name] = MemoryStore(max_bytes or DEFAULT_MAX_BYTES)
        store = _named[name]
    if max_bytes not in (0, store.max_bytes):
        raise StoreURLError(
            f"{url!r} is open already with max={format_bytes(store.max_bytes)}: "
            f"leave max out or give the same"
        )
    return store


def open_url(url: StoreURL) -> MemoryStore:
    if url.path not in ("", "/"):
        raise StoreURLError(f"{url.shown!r} has a path: write memory:// or memory://name")
    options = Options(url)
    asked = options.size("max", 0)
    options.finish()
    if "max" in url.options and asked == 0:
        raise StoreURLError(f"option 'max' in {url.shown!r} must be above 0")
    if url.host:
        return _open_named(url.host, asked, url.shown)
    return MemoryStore(asked or DEFAULT_MAX_BYTES, is_private=True)
