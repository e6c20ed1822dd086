"""From URLs to pages: one store, or several in front of each other, as a worker uses them.

    A?write=through B?write=back&codec=zstd      the fastest first

`write` and `codec` are options of every store; the others are the store's own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeVar

from quire.errors import StoreURLError
from quire.store.base import Pages, WriteWhen
from quire.store.client import PageStore
from quire.store.packing import Packer, PackKind
from quire.store.url import StoreURL, open_store, parse_url, split_urls

Choice = TypeVar("Choice", bound=enum.StrEnum)


def open_pages(text: str, *, clock: Callable[[], float]) -> Pages:
    """Raises StoreURLError, StoreError: one sentence with the fix. Then nothing stays open."""
    opened: list[tuple[PageStore, WriteWhen]] = []
    try:
        for url in split_urls(text):
            write = choice_in(url, "write", WriteWhen.THROUGH)
            kind = choice_in(url, "codec", PackKind.NONE)
            packer = None if kind is PackKind.NONE else Packer(kind)
            store = open_store(without_page_options(url))
            opened.append((PageStore(store, clock=clock, packer=packer), write))
    except BaseException:
        for pages, _ in opened:
            pages.close()
        raise
    if [write for _, write in opened] == [WriteWhen.THROUGH]:
        return opened[0][0]

    from quire.store.tiers import StoreTier, Tiers  # one store alone does without

    return Tiers([StoreTier(*each) for each in opened], clock=clock)


def check_pages(text: str) -> None:
    """Can these be opened? For whoever would otherwise find out late. One that is joined when it is
    opened is only looked at. Raises as `open_pages`."""
    for url in split_urls(text):
        choice_in(url, "write", WriteWhen.THROUGH)
        choice_in(url, "codec", PackKind.NONE)
        plain = without_page_options(url)
        if url.scheme == "mooncake":
            from quire.store.mooncake.store import read_url  # costs those who use it

            read_url(parse_url(plain))
        else:
            open_store(plain).close()


def is_only_read(url: StoreURL) -> bool:
    """Somebody else's, for us: it is not cleared either. Raises StoreURLError."""
    return choice_in(url, "write", WriteWhen.THROUGH) is WriteWhen.NEVER


def only_read(text: str) -> list[str]:
    """Those of these stores that are only read, for messages."""
    return [url.shown for url in split_urls(text) if is_only_read(url)]


def without_page_options(url: StoreURL) -> str:
    """As the store itself wants it."""
    if not {"write", "codec"} & url.options.keys():
        return url.text
    scheme = f"{url.scheme}+{url.inner}" if url.inner else url.scheme
    return url.without_options(scheme, {"write", "codec"})


def choice_in(url: StoreURL, name: str, default: Choice) -> Choice:
    """What the URL says of `write` or `codec`. Raises StoreURLError."""
    kinds = type(default)
    try:
        return kinds(url.options.get(name, default))
    except ValueError:
        valid = ", ".join(kinds)
        raise StoreURLError(f"option {name!r} in {url.shown!r}: give one of {valid}") from None
