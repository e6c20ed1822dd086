"""Fake bytes: every simulated page carries one number that only the right bytes could be.

`Oracle` says what a page must contain: a number derived from the namespace's fields, every token
up to the page's end, and the rank. It shares no code with quire.keys, so that a mistake there
shows up here as a wrong page. `Pools` is the memory of all ranks: what each page contains now.
Neither knows the tree, the manager or why anything is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from quire.keys import Namespace, UnitKind
from quire.types import PageIds, Tier, page_array

MAX_RANKS = 8
COMPONENTS = ("full", "window", "recurrent")
_TOKEN_BYTES = 4


class Oracle:
    def __init__(self) -> None:
        self._pages: dict[tuple[int, bytes], int] = {}
        self._roots: dict[Namespace, int] = {}
        """By the namespace's fields: its digest is part of what is under test."""
        self._by_digest: dict[bytes, int] = {}
        self._units: dict[int, UnitKind] = {}

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
            self._units[root] = namespace.unit
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
            self._units[known] = self._units[previous]
        return known

    def unit_of(self, content: int) -> UnitKind:
        """Of the namespace whose page it is."""
        return self._units[content]

    def after(self, namespace: Namespace, tokens: bytes) -> int:
        """Content after any number of tokens: of the last page, be it full or not. For token
        units."""
        full = self.pages(namespace, tokens)
        rest = tokens[len(full) * namespace.page_size * _TOKEN_BYTES :]
        before = full[-1] if full else self.register(namespace)
        return self.page_after(before, rest) if rest else before

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


def on_rank(content: int, rank: int, component: str = "full") -> int:
    """A rank holds its own shard of a page, and each component other state: same page, other
    bytes."""
    return (content * len(COMPONENTS) + COMPONENTS.index(component)) * MAX_RANKS + rank


def content_of(number: int, rank: int, component: str = "full") -> int | None:
    """The page of which a rank holds this as its shard; None: it is no such shard."""
    shard, there = divmod(number, MAX_RANKS)
    content, index = divmod(shard, len(COMPONENTS))
    right = number >= 0 and there == rank and COMPONENTS[index] == component
    return content if right else None


def _number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=7).digest(), "little")


class Pools:
    """Pool memory of all ranks. Pages start as garbage, and no garbage is like any other."""

    def __init__(self, num_ranks: int, sizes: Mapping[str, Sequence[int]]) -> None:
        """`sizes`: pages per component, on the device and on the host."""
        if num_ranks > MAX_RANKS:
            raise ValueError(f"the simulation has at most {MAX_RANKS} ranks")
        self.num_ranks = num_ranks
        self._next_garbage = -1
        self._memory = [
            {(name, tier): [0] * size[tier] for name, size in sizes.items() for tier in Tier}
            for _ in range(num_ranks)
        ]
        for rank, pools in enumerate(self._memory):
            for (name, tier), pages in pools.items():
                self.scribble(rank, tier, range(len(pages)), name)

    def read(
        self, rank: int, tier: Tier, pages: Iterable[int], component: str = "full"
    ) -> list[int]:
        memory = self._memory[rank][component, tier]
        return [memory[page] for page in pages]

    def write(
        self, rank: int, tier: Tier, page: int, content: int, component: str = "full"
    ) -> None:
        self._memory[rank][component, tier][page] = content

    def write_shard(self, rank: int, page: int, content: int, component: str) -> None:
        """A rank's shard of a page arrives on the host, cut from whatever shards others hold."""
        self.write(rank, Tier.HOST, page, on_rank(content, rank, component), component)

    def scribble(
        self, rank: int, tier: Tier, pages: Iterable[int], component: str = "full"
    ) -> None:
        """What is there is lost."""
        memory = self._memory[rank][component, tier]
        for page in pages:
            memory[page] = self._next_garbage
            self._next_garbage -= 1

    def scribble_everywhere(self, pages: Iterable[int], component: str = "full") -> None:
        """As scribble, for device pages that somebody was just given, on all ranks."""
        for rank in range(self.num_ranks):
            self.scribble(rank, Tier.DEVICE, pages, component)

    def compute(
        self, pages: Iterable[int], contents: Iterable[int], component: str = "full"
    ) -> None:
        """All ranks compute their shard of device pages."""
        for page, content in zip(pages, contents, strict=True):
            for rank, pools in enumerate(self._memory):
                pools[component, Tier.DEVICE][page] = on_rank(content, rank, component)

    def copy(self, source: int, target: int, component: str) -> None:
        """All ranks copy one device page to another."""
        for pools in self._memory:
            memory = pools[component, Tier.DEVICE]
            memory[target] = memory[source]

    def first_wrong(
        self,
        tier: Tier,
        pages: PageIds,
        contents: Sequence[int],
        ranks: Iterable[int],
        component: str = "full",
    ) -> tuple[int, int] | None:
        """(rank, index) of the first page that does not hold what it must; None: all do."""
        numbers = page_array(pages).tolist()
        for rank in ranks:
            memory = self._memory[rank][component, tier]
            for index, page in enumerate(numbers):
                if memory[page] != on_rank(contents[index], rank, component):
                    return rank, index
        return None
