"""SglangPages: SGLang's pages, by its keys, in one of Quire's stores. Knows no SGLang.

SGLang names a page by a digest of all tokens up to its end and says nothing of the weights, the
element type or how a page's bytes lie. Here all of that is in the name too: a page is found only by
an engine for which its bytes mean the same. Each is sealed and verified as every page of Quire's
is, so what a store damages is a miss.

A store that cannot be opened, or fails, costs misses; opening is tried again some time later.
Called from SGLang's own threads, several at once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import ConfigError, QuireError
from quire.store import HEADER_BYTES, Pages, Part, open_pages
from quire.types import NO_PARENT, PageKey, PageStatus

OPEN_AGAIN_S = 30.0
"""After a store could not be opened."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """What `--hicache-storage-backend-extra-config` may say beside SGLang's own words."""

    store: str
    model_fingerprint: str = ""
    """Empty: of the model's files, every byte of which is read at start."""
    timeout_s: float = 10.0
    """Of one call of the store."""


def read_options(given: Mapping[str, object]) -> SglangOptions:
    """Raises ConfigError, in one sentence with the option's name."""
    store, timeout_s = given.get("store"), given.get("timeout_s", 10.0)
    if not isinstance(store, str) or not store:
        raise ConfigError(
            'the storage backend\'s extra config needs a store, such as {"store": "file:///kv"}'
        )
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise ConfigError(f"timeout_s is {timeout_s!r}: it must be a number of seconds above 0")
    return SglangOptions(store, str(given.get("model_fingerprint") or ""), float(timeout_s))


@dataclass(frozen=True, slots=True)
class Shard:
    """Whose pages these are: one rank's of an engine."""

    rank: int
    num_ranks: int
    meaning: tuple[str, ...]
    """Weights, element type, order of a page's bytes: all that decides what they mean."""
    page_bytes: int


class SglangPages:
    def __init__(
        self, options: SglangOptions, shard: Shard, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock = clock
        self._prefix = _digest("sglang", *shard.meaning)
        self._page_bytes = shard.page_bytes
        padded = -(-shard.page_bytes // HEADER_BYTES) * HEADER_BYTES
        self._part = Part("full", shard.rank, shard.num_ranks, self._prefix, padded)
        self._lock = threading.Lock()
        self._pages: Pages | None = None
        self._open_at_s = clock()
        self._closed = False

    def num_present(self, keys: Sequence[str]) -> int:
        """Of these pages, one after the other: how many there are before the first missing one."""
        pages = self._opened()
        if pages is None or not keys:
            return 0
        (found,) = pages.find(self._part, [self._names(keys)], deadline=self._deadline())
        return (found + b"\0").index(b"\0")

    def get(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> list[bool]:
        """Fill each target with its page. One that is not had may hold anything."""
        pages = self._opened()
        if pages is None or not keys:
            return [False] * len(keys)
        rooms = [self._room(target, holds=False) for target in targets]
        names = self._names(keys)
        statuses = pages.get(
            self._part, names, [_bytes_of(room) for room in rooms], deadline=self._deadline()
        )
        had = [status is PageStatus.OK for status in statuses]
        for target, room, ok in zip(targets, rooms, had, strict=True):
            if ok and room is not target:
                _raw(target).copy_(room[: self._page_bytes])
        num_leading = [*had, False].index(False)
        pages.touch(self._part, names[:num_leading])
        return had

    def put(
        self, keys: Sequence[str], values: Sequence[torch.Tensor], before: str | None = None
    ) -> list[bool]:
        """Keep these pages, which follow each other. `before`: the one that they follow."""
        pages = self._opened()
        if pages is None or not keys:
            return [False] * len(keys)
        names = self._names(keys)
        first = NO_PARENT if before is None else self._names([before])[0]
        rooms = [self._room(value, holds=True) for value in values]
        statuses = pages.put(
            self._part,
            names,
            [_bytes_of(room) for room in rooms],
            deadline=self._deadline(),
            parents=[first, *names[:-1]],
        )
        return [status is PageStatus.OK for status in statuses]

    def clear(self) -> None:
        """All pages of the store are misses, those of other engines too. Raises OSError."""
        pages = self._opened()
        if pages is not None:
            pages.clear()

    def counters(self) -> dict[str, int]:
        with self._lock:
            return self._pages.counters() if self._pages is not None else {}

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pages, self._pages = self._pages, None
        if pages is not None:
            pages.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _opened(self) -> Pages | None:
        with self._lock:
            if self._pages is None and not self._closed and self._clock() >= self._open_at_s:
                self._open_at_s = self._clock() + OPEN_AGAIN_S
                try:
                    self._pages = open_pages(self._options.store, clock=self._clock)
                except (QuireError, OSError) as error:
                    _logger.warning("the store cannot be used, and is tried again: %s", error)
            return self._pages

    def _deadline(self) -> float:
        return self._clock() + self._options.timeout_s

    def _names(self, keys: Sequence[str]) -> list[PageKey]:
        return [PageKey(hashlib.sha256(self._prefix + key.encode()).digest()) for key in keys]

    def _room(self, tensor: torch.Tensor, *, holds: bool) -> torch.Tensor:
        """Bytes as the store wants them: the tensor's own, or a copy that is padded."""
        if tensor.nbytes != self._page_bytes:
            raise ConfigError(f"a page of {tensor.nbytes} bytes, among pages of {self._page_bytes}")
        size = self._part.page_bytes
        if tensor.nbytes == size and tensor.is_contiguous() and tensor.device.type == "cpu":
            return tensor
        room = torch.zeros(size, dtype=torch.uint8)
        if holds:
            room[: tensor.nbytes] = _raw(tensor)
        return room


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _bytes_of(room: torch.Tensor) -> memoryview:
    return _raw(room).numpy().data


def _digest(*fields: str) -> bytes:
    digest = hashlib.sha256()
    for field in fields:
        raw = field.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()
