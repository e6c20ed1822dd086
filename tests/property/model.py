"""NaiveCache: what a cache holds, as plain dicts from prefixes to nothing clever.

A prefix is a tuple of pages, a page a tuple of tokens. No tree, no nodes, no splits. What appears
and disappears is told by the cache's events and checked here against what may happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.keys import Namespace, PrefixKey, UnitKind
from quire.types import PAGE_KEY_BYTES

Prefix = tuple[tuple[int, ...], ...]


def prefixes(tokens: Sequence[int], page_size: int, unit: UnitKind) -> list[Prefix]:
    """All page-aligned prefixes of a token sequence, shortest first."""
    width = page_size + (1 if unit is UnitKind.PAIR else 0)
    pages = [tuple(tokens[at : at + width]) for at in range(0, len(tokens) - width + 1, page_size)]
    return [tuple(pages[: n + 1]) for n in range(len(pages))]


class NaiveCache:
    def __init__(self, namespace: Namespace, parts: Sequence[str], window_pages: int) -> None:
        self._namespace = namespace
        self._window_pages = window_pages
        self._names: dict[bytes, Prefix] = {}
        self.held: dict[str, dict[str, set[Prefix]]] = {
            part: {"device": set(), "host": set()} for part in parts
        }
        """By component and tier: the prefixes whose last page, or state after it, is there."""

    @property
    def device(self) -> set[Prefix]:
        """Pages of full attention on the device."""
        return self.held["full"]["device"]

    @property
    def host(self) -> set[Prefix]:
        return self.held["full"]["host"]

    def prefixes(self, tokens: Sequence[int]) -> list[Prefix]:
        return prefixes(tokens, self._namespace.page_size, self._namespace.unit)

    def learn(self, tokens: Sequence[int]) -> PrefixKey:
        """A key for `tokens`; from now on its page keys can be read."""
        key = PrefixKey(self._namespace, list(tokens))
        for name, prefix in zip(_split(key.page_keys()), self.prefixes(tokens), strict=True):
            known = self._names.setdefault(name, prefix)
            assert known == prefix, "one page key for two prefixes"
        return key

    def named(self, keys: bytes) -> list[Prefix]:
        return [self._names[name] for name in _split(keys)]

    def needed(self, part: str, path: Sequence[Prefix]) -> Sequence[Prefix]:
        """What going on at the end of `path` needs of a component."""
        match part:
            case "window":
                return path[-self._window_pages :]
            case "recurrent":
                return path[-1:]
            case _:
                return path

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(pages on the device, further pages on either tier), by looking at every prefix."""
        path = self.prefixes(tokens)
        on_device = self._deepest(path, ("device",))
        return on_device, self._deepest(path, ("device", "host")) - on_device

    def is_usable(self, path: Sequence[Prefix], tiers: Sequence[str]) -> bool:
        """Can one go on at the end of `path` with what these tiers hold?"""
        return all(
            any(prefix in held[tier] for tier in tiers)
            for part, held in self.held.items()
            for prefix in self.needed(part, path)
        )

    def _deepest(self, path: Sequence[Prefix], tiers: Sequence[str]) -> int:
        ends = range(len(path), 0, -1)
        return next((end for end in ends if self.is_usable(path[:end], tiers)), 0)


def _split(keys: bytes) -> Iterator[bytes]:
    for at in range(0, len(keys), PAGE_KEY_BYTES):
        yield keys[at : at + PAGE_KEY_BYTES]
