"""Whereabouts: which of several stores said that they have a page, and how fast each of them is.

Hints only: a page that is not where it was said to be is looked for elsewhere. Bounded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from statistics import median

from quire.store.base import Part
from quire.types import PageKey

MAX_PAGES = 1 << 16
_SAMPLES = 9
_LATELY = 32
"""Calls, of all stores."""
_MAX_PACE = 64.0

Whereabout = tuple[bytes, str, int, int, PageKey]
"""Whose, component, shard of how many, and key."""


class Whereabouts:
    """Thread-safe. Stores by number, in the order given, which is that of their speed until all
    of them have been measured."""

    def __init__(self, num_stores: int) -> None:
        self._lock = threading.Lock()
        self._said: dict[Whereabout, dict[int, bool]] = {}
        self._samples: list[deque[float]] = [deque(maxlen=_SAMPLES) for _ in range(num_stores)]
        self._lately: deque[tuple[int, float]] = deque(maxlen=_LATELY)
        """Pages, and seconds, of calls of all of them."""

    def learn(self, part: Part, keys: Sequence[PageKey], found: bytes, store: int) -> None:
        """What a store has answered about these pages, one byte each."""
        with self._lock:
            for key, is_there in zip(keys, found, strict=True):
                self._said.setdefault(_place(part, key), {})[store] = bool(is_there)
            while len(self._said) > MAX_PAGES:
                del self._said[next(iter(self._said))]

    def forget(self, part: Part, keys: Sequence[PageKey]) -> None:
        """They are being written: what was said of them is old."""
        with self._lock:
            for key in keys:
                self._said.pop(_place(part, key), None)

    def measured(self, store: int, num_pages: int, seconds: float) -> None:
        if num_pages:
            with self._lock:
                self._samples[store].append(seconds / num_pages)
                self._lately.append((num_pages, seconds))

    def order(self) -> list[int]:
        """The fastest first."""
        with self._lock:
            stores = range(len(self._samples))
            if not all(self._samples):
                return list(stores)
            return sorted(stores, key=lambda store: median(self._samples[store]))

    def seconds_per_page(self) -> list[float | None]:
        with self._lock:
            return [median(samples) if samples else None for samples in self._samples]

    def pace(self, part: Part, keys: Sequence[PageKey]) -> float:
        """Seconds of one of these pages, where each would be read from, by those of one of the
        pages that were read lately. 1: not enough is known."""
        order, rates = self.order(), self.seconds_per_page()
        wanted = [self.candidates(part, key, order)[:1] for key in keys]
        known = [rates[store] for (store,) in filter(None, wanted)]
        measured = [rate for rate in known if rate is not None]
        with self._lock:
            num_pages = sum(pages for pages, _ in self._lately)
            seconds = sum(seconds for _, seconds in self._lately)
        if not measured or len(measured) < len(known) or not seconds:
            return 1.0
        pace = sum(measured) / len(measured) / (seconds / num_pages)
        return min(_MAX_PACE, max(1 / _MAX_PACE, pace))

    def candidates(self, part: Part, key: PageKey, order: Sequence[int]) -> list[int]:
        """Where to look for a page: in those that said they have it, then in those that did not
        answer; not in those that said no."""
        with self._lock:
            said = self._said.get(_place(part, key), {})
            has = [store for store in order if said.get(store)]
            return has + [store for store in order if store not in said]


def _place(part: Part, key: PageKey) -> Whereabout:
    return part.fingerprint, part.component, part.shard, part.num_shards, key
