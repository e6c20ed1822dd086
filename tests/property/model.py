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
    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._names: dict[bytes, Prefix] = {}
        self.tiers: dict[str, set[Prefix]] = {"device": set(), "host": set()}

    @property
    def device(self) -> set[Prefix]:
        return self.tiers["device"]

    @property
    def host(self) -> set[Prefix]:
        return self.tiers["host"]

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

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(pages on the device, further pages on either tier), by looking at every prefix."""
        on_device = on_either = 0
        for prefix in self.prefixes(tokens):
            if prefix in self.device and on_device == on_either:
                on_device += 1
            elif prefix not in self.device and prefix not in self.host:
                break
            on_either += 1
        return on_device, on_either - on_device


def _split(keys: bytes) -> Iterator[bytes]:
    for at in range(0, len(keys), PAGE_KEY_BYTES):
        yield keys[at : at + PAGE_KEY_BYTES]
