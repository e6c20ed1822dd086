"""SimStore: a shared store as a dict, which forgets pages when told to.

Knows objects by (page key, component, rank): each rank stores its own shard. Does not know time
or faults of calls; those are the workers' (quire.sim.workers, quire.sim.faults).
"""

from __future__ import annotations

from random import Random

from quire.types import PageKey

ObjectName = tuple[PageKey, str, int]


class SimStore:
    def __init__(self) -> None:
        self._objects: dict[ObjectName, int] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def put(self, name: ObjectName, content: int) -> None:
        self._objects[name] = content

    def get(self, name: ObjectName) -> int | None:
        return self._objects.get(name)

    def present(self, keys: list[PageKey], component: str, rank: int) -> bytes:
        return bytes((key, component, rank) in self._objects for key in keys)

    def clear(self) -> None:
        self._objects.clear()

    def forget(self, rng: Random, count: int) -> int:
        """Evict up to `count` objects at random: a hole in the middle of something."""
        names = list(self._objects)
        victims = rng.sample(names, min(count, len(names)))
        for name in victims:
            del self._objects[name]
        return len(victims)


class SimStores:
    """The stores of a cluster by URL: detaching one does not empty it."""

    def __init__(self) -> None:
        self._stores: dict[str, SimStore] = {}

    def open(self, url: str) -> SimStore:
        return self._stores.setdefault(url, SimStore())

    def forget(self, rng: Random, count: int) -> int:
        return sum(store.forget(rng, count) for store in self._stores.values())
