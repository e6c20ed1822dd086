"""SimStore: a shared store as a dict, with room for so many pages, which forgets some when told to.

Knows objects by (page key, component, rank): each rank stores its own shard. Order of use is that
of prefixes: a page is never given up before what needs it, and not taken without what it needs.
Does not know time or faults of calls; those are the workers' (quire.sim.workers, quire.sim.faults).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

from quire.types import NO_PARENT, Owner, PageKey, PageStatus

_ObjectName = tuple[PageKey, str, int]
_STEP = 1 << 20
"""Between two uses: more than a prefix has pages."""


@dataclass(slots=True)
class _Object:
    content: int
    parent: _ObjectName | None
    used: int
    owner: str


class SimStore:
    def __init__(self, max_objects: int = 0) -> None:
        """`max_objects` = 0: as many as come."""
        self._objects: dict[_ObjectName, _Object] = {}
        self._max_objects = max_objects
        self._now = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._objects)

    def put(
        self,
        name: _ObjectName,
        content: int,
        parent: PageKey | None = None,
        owner: Owner | None = None,
    ) -> PageStatus:
        """`parent`: the page before it, without which this is of no use. `owner`: whose share of
        the room it needs, where that is bounded."""
        above = None if parent is None or parent == NO_PARENT else (parent, *name[1:])
        if above is not None and above not in self._objects:
            return PageStatus.ORPHAN
        self._now += _STEP
        used = self._now if above is None else min(self._now, self._objects[above].used - 1)
        is_bound = owner is not None and self._max_objects and name not in self._objects
        if owner is not None and is_bound and not self._has_room(owner, used):
            return PageStatus.REJECTED
        self._objects[name] = _Object(content, above, used, "" if owner is None else owner.name)
        if self._max_objects and len(self._objects) > self._max_objects:
            self.evicted += 1
            del self._objects[min(self._objects, key=lambda each: self._objects[each].used)]
        return PageStatus.OK

    def _has_room(self, owner: Owner, bound: int) -> bool:
        """Who has its share makes room among its own that are colder than `bound`."""
        own = [name for name, each in self._objects.items() if each.owner == owner.name]
        if len(own) < int(self._max_objects * owner.share):
            return True
        coldest = min(own, key=lambda each: self._objects[each].used, default=None)
        if coldest is None or self._objects[coldest].used >= bound:
            return False
        self.evicted += 1
        del self._objects[coldest]
        return True

    def get(self, name: _ObjectName) -> int | None:
        found = self._objects.get(name)
        return None if found is None else found.content

    def touch(
        self, keys: Iterable[PageKey], component: str, rank: int, *, each: bool = False
    ) -> None:
        """A prefix is used, in the order of its pages, so far as it is there; with `each` all that
        are there of these."""
        self._now += _STEP
        for at, key in enumerate(keys):
            found = self._objects.get((key, component, rank))
            if found is not None:
                found.used = self._now - at
            elif not each:
                break

    def present(self, keys: list[PageKey], component: str, rank: int) -> bytes:
        self.touch(keys, component, rank)
        return bytes((key, component, rank) in self._objects for key in keys)

    def num_usable(self) -> int:
        """Objects that all are there of what they need."""
        known: dict[_ObjectName, bool] = {}

        def is_usable(name: _ObjectName) -> bool:
            path: list[_ObjectName] = []
            at: _ObjectName | None = name
            while at is not None and at not in known and at in self._objects:
                path.append(at)
                at = self._objects[at].parent
            is_there = at is None or known.get(at, False)
            known.update(dict.fromkeys(path, is_there))
            return is_there

        return sum(is_usable(name) for name in self._objects)

    def clear(self) -> None:
        self._objects.clear()

    def objects(self) -> Iterator[tuple[_ObjectName, int]]:
        """All that is there, and what it contains."""
        return ((name, found.content) for name, found in self._objects.items())

    def forget(self, rng: Random, count: int) -> int:
        """Lose up to `count` objects at random: a hole in the middle of something."""
        names = list(self._objects)
        victims = rng.sample(names, min(count, len(names)))
        for name in victims:
            del self._objects[name]
        return len(victims)


class SimStores:
    """The stores of a cluster by URL: detaching one does not empty it."""

    def __init__(self, max_objects: int = 0) -> None:
        """`max_objects`: of each."""
        self._stores: dict[str, SimStore] = {}
        self._max_objects = max_objects

    def open(self, url: str) -> SimStore:
        if url not in self._stores:
            self._stores[url] = SimStore(self._max_objects)
        return self._stores[url]

    def objects(self) -> Iterator[tuple[_ObjectName, int]]:
        for store in self._stores.values():
            yield from store.objects()

    def forget(self, rng: Random, count: int) -> int:
        return sum(store.forget(rng, count) for store in self._stores.values())

    def counters(self) -> dict[str, int]:
        stores = self._stores.values()
        return {
            "store objects": sum(map(len, stores)),
            "store usable": sum(store.num_usable() for store in stores),
            "store evicted": sum(store.evicted for store in stores),
        }
