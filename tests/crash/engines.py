"""Engine-like processes on one store directory, and what of it is of use afterwards.

`python engines.py ROOT SEED NUM_TURNS NUM_PAGES`: one process, which plays turns of conversations
that all processes share, against a store with room for NUM_PAGES pages, and says a line every ten
turns. A turn uses a path: a system prompt shared by many conversations, then the conversation's
own pages. What the engine has in its own memory of it is touched; the rest is probed for and read
as far as it is there, and what was missing is written. Orphans make it write the whole path, as
the leader does.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.store import HEADER_BYTES, PageStore, Part
from quire.store.file import FileStore
from quire.types import NO_PARENT, PageKey, PageStatus

PART = Part("full", 0, 1, b"f" * 32, 2 * HEADER_BYTES)
OBJECT_BYTES = PART.page_bytes + HEADER_BYTES
NUM_PROMPTS, PROMPT_PAGES = 20, 8
NUM_CONVERSATIONS, MAX_PAGES = 300, 40
OP_PAGES = 16


def key(name: str, page: int) -> PageKey:
    return PageKey(hashlib.sha256(f"{name}/{page}".encode()).digest())


def path_of(conversation: int) -> list[PageKey]:
    prompt = [key(f"prompt{conversation % NUM_PROMPTS}", i) for i in range(PROMPT_PAGES)]
    return prompt + [key(f"own{conversation}", i) for i in range(MAX_PAGES)]


class Engine:
    def __init__(self, root: Path, seed: int, num_pages: int) -> None:
        store = FileStore(root, max_bytes=num_pages * OBJECT_BYTES, reserve_bytes=0)
        self._store = PageStore(store, clock=time.monotonic)
        self._chance = random.Random(seed)
        self._pages = [memoryview(mmap.mmap(-1, PART.page_bytes)) for _ in range(OP_PAGES)]

    def turn(self) -> None:
        # A few conversations are used much more than the others.
        conversation = int(NUM_CONVERSATIONS * self._chance.random() ** 3)
        path = path_of(conversation)[: PROMPT_PAGES + self._chance.randrange(1, MAX_PAGES)]
        in_memory = self._chance.choice([0, 0, self._chance.randrange(len(path)), len(path) - 4])
        self._store.touch(PART, path[:in_memory])
        first = in_memory + self._read(path[in_memory:])
        if not self._write(path, first):
            self._write(path, 0)

    def _read(self, path: Sequence[PageKey]) -> int:
        """How many of these pages came, which may be the end of a path."""
        deadline = time.monotonic() + 60
        hits = sum(self._store.find(PART, [path], deadline=deadline)[0])
        for first in range(0, hits, OP_PAGES):
            keys = path[first : min(first + OP_PAGES, hits)]
            pages = self._pages[: len(keys)]
            statuses = self._store.get(PART, keys, pages, deadline=deadline)
            for page_key, page, status in zip(keys, pages, statuses, strict=True):
                assert status in (PageStatus.OK, PageStatus.MISS), status
                assert status is PageStatus.MISS or page[:32] == page_key
        self._store.touch(PART, path[:hits])
        return hits

    def _write(self, path: Sequence[PageKey], start: int) -> bool:
        """False: the store lacks what comes before."""
        parents = [NO_PARENT, *path]
        used_ns = time.time_ns()
        for first in range(start, len(path), OP_PAGES):
            keys = path[first : first + OP_PAGES]
            for page, page_key in zip(self._pages, keys, strict=False):
                page[:32] = page_key
            statuses = self._store.put(
                PART,
                keys,
                self._pages[: len(keys)],
                parents=parents[first : first + len(keys)],
                used_ns=used_ns - first * 1000,
                deadline=time.monotonic() + 60,
            )
            if PageStatus.ORPHAN in statuses:
                return False
        return True


def usable_share(root: Path) -> tuple[int, int]:
    """(pages whose whole prefix is there, pages)."""
    there = {path.name[:64] for path in _objects(root)}
    usable = set()
    for conversation in range(NUM_CONVERSATIONS):
        for page_key in path_of(conversation):
            if page_key.hex() not in there:
                break
            usable.add(page_key.hex())
    return len(usable), len(there)


def used_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in _objects(root))


def _objects(root: Path) -> Iterator[Path]:
    return (path for path in root.glob("objects/*/*") if not path.name.startswith("."))


if __name__ == "__main__":
    engine = Engine(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4]))
    for number in range(int(sys.argv[3])):
        engine.turn()
        if number % 10 == 0:
            print("turn", number, flush=True)
