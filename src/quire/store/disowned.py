"""Disowned: pages of a store that are wrong although they are whole.

    disowned ──► a miss ──► taken out, or written anew ──► as any other
                   │
                   └─ while somebody who began before is writing it: it stays a miss, nobody writes
                      it, and who ends last takes it out

Knows names only: how one is taken out is the store's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from quire.store.base import ObjectName


class Disowned:
    """Thread-safe."""

    def __init__(self, take_out: Callable[[ObjectName], bool]) -> None:
        """`take_out(name)`: False: the store does not let go of it."""
        self._take_out = take_out
        self._taking_out = threading.Lock()
        self._lock = threading.Lock()
        self._names: set[ObjectName] = set()
        """Those that the store may still have."""
        self._stale: set[ObjectName] = set()
        """Of them those that are being written with the bytes that were wrong."""
        self._calls: dict[object, Sequence[ObjectName]] = {}
        """What is being written, by who writes it: looked through when something is disowned, which
        is rare, so that writing costs nothing."""

    def __bool__(self) -> bool:
        return bool(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def is_stale(self, name: ObjectName) -> bool:
        """It is being written by somebody who began before it was disowned."""
        return name in self._stale

    def add(self, names: Sequence[ObjectName]) -> None:
        with self._lock:
            self._names.update(names)
            self._stale.update(self._written(names))

    @contextmanager
    def writing(self, names: Sequence[ObjectName]) -> Iterator[None]:
        """From when their bytes are given to be written until they are, or will not be."""
        call = object()
        with self._lock:
            self._calls[call] = names
        try:
            yield
        finally:
            with self._lock:
                del self._calls[call]
                left = self._stale - self._written(self._stale)
                self._stale -= left
            self.take_out(left)

    def _written(self, names: Collection[ObjectName]) -> set[ObjectName]:
        """Those of them that are being written."""
        if not names:
            return set()
        return {name for own in self._calls.values() for name in own}.intersection(names)

    def take_out(self, names: Collection[ObjectName]) -> None:
        """Of these the disowned, unless they are just being written: then later."""
        for name in names:
            with self._taking_out:
                is_due = name in self._names and name not in self._stale
                if is_due and self._take_out(name):
                    with self._lock:
                        self._names.discard(name)
