"""A store that misbehaves on purpose, by seed: wraps any store, for tests, demos and drills.

`faulty+file:///path?seed=7&corrupt=0.1`: each fault has a probability per object, or per call
for `raise` and `delay`; options it does not know go to the store it wraps.

    drop      get: a miss though it is there; put: reports OK and stores nothing
    truncate  put: stores an object that ends early
    corrupt   get, put: flips one bit, in the header or in the payload
    raise     the call raises
    delay     the call first sleeps `delay_s`
    fail_nth  exactly the n-th call (contains, get, put, touch, quarantine; from 1) raises
    rate      get: no more than so many bytes a second, all calls together

Knows nothing of checksums: whether faults are noticed is for the reader to prove.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.errors import StoreURLError
from quire.store.base import (
    HEADER_BYTES,
    Blob,
    NewObject,
    ObjectName,
    Store,
    StoredObject,
    StoreStats,
)
from quire.store.url import Options, StoreURL, open_store
from quire.types import PageStatus


class InjectedFault(OSError):
    """Raised by FaultyStore only."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probabilities from 0 to 1."""

    drop: float = 0.0
    truncate: float = 0.0
    corrupt: float = 0.0
    raise_: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.05
    fail_nth: int = 0
    """0: never."""
    rate: int = 0
    """Bytes a second; 0: as fast as it can."""


class FaultyStore:
    def __init__(
        self,
        inner: Store,
        faults: FaultRates,
        *,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self.faults = faults
        self.num_calls = 0
        self._random = random.Random(seed)
        self._sleep = sleep
        self._clock = clock
        self._free_s = 0.0
        """When all that was asked for so far has passed, at this rate."""
        self._lock = threading.Lock()

    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        self._before_call()
        return self.inner.contains(names, deadline=deadline)

    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        self._before_call()
        passed_s = self._passed_s(sum(blob.payload.nbytes for blob in into))
        # A plain list: nothing has landed before we have laid hands on it.
        statuses = list(self.inner.get(names, list(into), deadline=deadline))
        if (left_s := passed_s - self._clock()) > 0:
            self._sleep(left_s)
        for i, blob in enumerate(into):
            if statuses[i] is not PageStatus.OK:
                continue
            if self._strikes(self.faults.drop):
                statuses[i] = PageStatus.MISS
            elif self._strikes(self.faults.corrupt):
                self._flip_bit(blob)
        return statuses

    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        self._before_call()
        statuses = [PageStatus.OK] * len(objects)
        kept = [i for i in range(len(objects)) if not self._strikes(self.faults.drop)]
        damaged = [objects[i].with_blob(self._damaged(objects[i].blob)) for i in kept]
        for i, status in zip(kept, self.inner.put(damaged, deadline=deadline), strict=True):
            statuses[i] = status
        return statuses

    def touch(self, names: Sequence[ObjectName], *, used_ns: int, each: bool = False) -> None:
        self._before_call()
        self.inner.touch(names, used_ns=used_ns, each=each)

    def quarantine(self, name: ObjectName) -> bool:
        self._before_call()
        return self.inner.quarantine(name)

    def scan(self) -> Iterator[StoredObject]:
        return self.inner.scan()

    def clear(self, *, wait: bool = False) -> int:
        return self.inner.clear(wait=wait)

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()

    def _before_call(self) -> None:
        with self._lock:
            self.num_calls += 1
            is_nth = self.num_calls == self.faults.fail_nth
        if self._strikes(self.faults.delay):
            self._sleep(self.faults.delay_s)
        if is_nth or self._strikes(self.faults.raise_):
            raise InjectedFault("injected fault")

    def _passed_s(self, num_bytes: int) -> float:
        """When so many bytes will have passed, after those before them."""
        if not self.faults.rate:
            return 0.0
        with self._lock:
            self._free_s = max(self._free_s, self._clock()) + num_bytes / self.faults.rate
            return self._free_s

    def _strikes(self, probability: float) -> bool:
        if not probability:
            return False
        with self._lock:
            return self._random.random() < probability

    def _damaged(self, blob: Blob) -> Blob:
        """What is stored in place of `blob`. The caller's own bytes are never touched."""
        if self._strikes(self.faults.truncate):
            return Blob(blob.header, blob.payload[: blob.payload.nbytes // 2])
        if self._strikes(self.faults.corrupt):
            copy = Blob(memoryview(bytearray(blob.header)), memoryview(bytearray(blob.payload)))
            self._flip_bit(copy)
            return copy
        return blob

    def _flip_bit(self, blob: Blob) -> None:
        with self._lock:
            in_header = self._random.random() < 0.5
            target = blob.header[:HEADER_BYTES] if in_header else blob.payload
            target[self._random.randrange(target.nbytes)] ^= 1 << self._random.randrange(8)


def open_url(url: StoreURL) -> FaultyStore:
    if not url.inner:
        raise StoreURLError(
            f"{url.shown!r} names no store to wrap: write faulty+SCHEME://..., "
            f"such as faulty+memory://?drop=0.1"
        )
    options = Options(url)
    faults = FaultRates(
        drop=options.number("drop", 0.0, maximum=1.0),
        truncate=options.number("truncate", 0.0, maximum=1.0),
        corrupt=options.number("corrupt", 0.0, maximum=1.0),
        raise_=options.number("raise", 0.0, maximum=1.0),
        delay=options.number("delay", 0.0, maximum=1.0),
        delay_s=options.number("delay_s", 0.05),
        fail_nth=options.integer("fail_nth", 0),
        rate=options.size("rate", 0),
    )
    seed = options.integer("seed", 0)
    inner = url.without_options(url.inner, set(options.known))
    return FaultyStore(open_store(inner, must_exist=url.must_exist), faults, seed=seed)
