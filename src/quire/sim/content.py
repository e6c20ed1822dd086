"""Fake bytes: every simulated page carries one number that only the right bytes could be.

`Oracle` says what a page must contain: a number derived from the namespace's fields, every token
up to the page's end, and the rank. It shares no code with quire.keys, so that a mistake there
shows up here as a wrong page. `Pools` is the memory of all ranks: what each page contains now.
Neither knows the tree, the manager or why anything is copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from quire.keys import Namespace, UnitKind
from quire.types import PageIds, Tier, page_array

MAX_RANKS = 8
_TOKEN_BYTES = 4


class Oracle:
    def __init__(self) -> None:
        self._pages: dict[tuple[int, bytes], int] = {}
        self._roots: dict[Namespace, int] = {}
        """By the namespace's fields: its digest is part of what is under test."""
        self._by_digest: dict[bytes, int] = {}

    def register(self, namespace: Namespace) -> int:
        """Content "before page 0" of a namespace."""
        root = self._roots.get(namespace)
        if root is None:
            fields = (
                namespace.model_fingerprint,
                namespace.kv_dtype,
                namespace.page_size,
                namespace.unit.value,
                namespace.adapter,
                namespace.salt,
            )
            root = self._roots[namespace] = _number(repr(fields).encode())
            self._by_digest.setdefault(namespace.digest, root)
        return root

    def root(self, digest: bytes) -> int:
        """The same, for a namespace registered before, by its digest."""
        return self._by_digest[digest]

    def page_after(self, previous: int, tokens: bytes) -> int:
        """Content of the page holding `tokens` (overlap included) after the page `previous`."""
        known = self._pages.get((previous, tokens))
        if known is None:
            known = _number(previous.to_bytes(8, "little") + tokens)
            self._pages[previous, tokens] = known
        return known

    def pages(self, namespace: Namespace, tokens: bytes) -> list[int]:
        """Contents of all full pages of a token sequence (int32 little-endian bytes)."""
        step = namespace.page_size * _TOKEN_BYTES
        width = step + (_TOKEN_BYTES if namespace.unit is UnitKind.PAIR else 0)
        content = self.register(namespace)
        contents: list[int] = []
        for start in range(0, len(tokens) - width + 1, step):
            content = self.page_after(content, tokens[start : start + width])
            contents.append(content)
        return contents


def on_rank(content: int, rank: int) -> int:
    """A rank holds its own shard of a page: same page, other bytes."""
    return content * MAX_RANKS + rank


def _number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=7).digest(), "little")


class Pools:
    """Pool memory of all ranks. Pages start as garbage, and no garbage is like any other."""

    def __init__(self, num_ranks: int, sizes: dict[Tier, int]) -> None:
        if num_ranks > MAX_RANKS:
            raise ValueError(f"the simulation has at most {MAX_RANKS} ranks")
        self.num_ranks = num_ranks
        self._next_garbage = -1
        self._memory = [{tier: [0] * sizes[tier] for tier in Tier} for _ in range(num_ranks)]
        for rank, tiers in enumerate(self._memory):
            for tier, pages in tiers.items():
                self.scribble(rank, tier, range(len(pages)))

    def read(self, rank: int, tier: Tier, pages: Iterable[int]) -> list[int]:
        memory = self._memory[rank][tier]
        return [memory[page] for page in pages]

    def write(self, rank: int, tier: Tier, page: int, content: int) -> None:
        self._memory[rank][tier][page] = content

    def scribble(self, rank: int, tier: Tier, pages: Iterable[int]) -> None:
        """What is there is lost."""
        memory = self._memory[rank][tier]
        for page in pages:
            memory[page] = self._next_garbage
            self._next_garbage -= 1

    def compute(self, pages: Iterable[int], contents: Iterable[int]) -> None:
        """All ranks compute their shard of device pages."""
        for page, content in zip(pages, contents, strict=True):
            for rank, tiers in enumerate(self._memory):
                tiers[Tier.DEVICE][page] = on_rank(content, rank)

    def first_wrong(
        self, tier: Tier, pages: PageIds, contents: list[int], ranks: Iterable[int]
    ) -> tuple[int, int] | None:
        """(rank, index) of the first page that does not hold what it must; None: all do."""
        numbers = page_array(pages).tolist()
        for rank in ranks:
            memory = self._memory[rank][tier]
            for index, page in enumerate(numbers):
                if memory[page] != contents[index] * MAX_RANKS + rank:
                    return rank, index
        return None
