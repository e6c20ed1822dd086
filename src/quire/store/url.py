"""Store URLs: parsing, typed options, and finding the scheme's opener through entry points.

A scheme is registered in the entry-point group `quire.stores` as a function
`open_url(url: StoreURL) -> Store`. A wrapper is written in front of what it wraps, as in
`faulty+file:///path`; the wrapper's opener receives the rest in `StoreURL.inner`. Several URLs with
blanks between them are stores in front of each other: opening.py opens those.
Knows nothing of any particular store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from quire.errors import ConfigError, StoreError, StoreURLError
from quire.sizes import parse_size
from quire.store.base import Store

GROUP = "quire.stores"
_LONGEST, _LONGEST_SCHEME = 2048, 32
"""Of what is shown."""
_MAX_DIGITS = 18
"""Of a number: it fits 64 bits."""
_SECRETS = "pass|secret|token|key|credential|signature|auth"
"""Words in the names of options that sound secret."""


class _Patterns:
    """Where credentials stand in a URL that ends before any of the characters `ends`."""

    def __init__(self, ends: str) -> None:
        # User and password, also where a password holds a raw slash.
        self.userinfo = re.compile(rf"(?<=://)(?:[^/?#{ends}]*|[^@{ends}]*:[^{ends}]*)@")
        # Of a URL that is the value of an option.
        self.quoted_userinfo = re.compile(rf"(?<=%3a%2f%2f)[^&{ends}]*?(?=%40)", re.IGNORECASE)
        self.secret_option = re.compile(
            rf"((?:[?&]|%3f|%26)(?:[^=&{ends}]*(?:{_SECRETS})[^=&{ends}]*|sig|pwd?)(?:=|%3d))"
            rf"[^&{ends}]*",
            re.IGNORECASE,
        )


_BARE, _IN_QUOTES = _Patterns(r"\s"), _Patterns(r"\s'\"")


@dataclass(frozen=True, slots=True)
class StoreURL:
    """A parsed URL. `options` holds the query as written."""

    text: str
    scheme: str
    inner: str
    """What follows `scheme+`, as a scheme of its own; empty when nothing is wrapped."""
    host: str
    path: str
    options: dict[str, str]
    must_exist: bool = False
    """Open what is there and create nothing: for listing, verifying, clearing."""

    def __repr__(self) -> str:
        return f"<StoreURL {self.shown}>"

    @property
    def shown(self) -> str:
        """For messages."""
        return redact(self.text)

    @property
    def credentials(self) -> tuple[str, str]:
        """User and password; each empty if it is not given. Never for messages."""
        user, _, password = self.host.rpartition("@")[0].partition(":")
        return _spoken(user), _spoken(password)

    def without_options(self, scheme: str, drop: set[str]) -> str:
        """The URL again, under another scheme and less some options."""
        rest = {name: value for name, value in self.options.items() if name not in drop}
        base = self.text.partition("?")[0].partition("://")[2]
        return f"{scheme}://{base}" + (f"?{urlencode(rest)}" if rest else "")


def _spoken(quoted: str) -> str:
    """Of any bytes, as they were typed or written as %FF."""
    return unquote(quoted, errors="surrogateescape")


def redact(text: str) -> str:
    """Any text without the credentials of the URLs in it, wherever in them somebody put those."""
    return "".join(map(_redacted, re.split(r"(\s+)", text)))


def _redacted(word: str) -> str:
    """A quote ends a URL that stands in quotes; else it may be part of a password. What is longer
    than any URL is not looked through, nor shown."""
    if len(word) > _LONGEST:
        scheme, there, _ = word.partition("://")
        return f"{scheme}://***" if there and len(scheme) <= _LONGEST_SCHEME else "***"
    known = _IN_QUOTES if {"'", '"'} & set(word.partition("://")[0]) else _BARE
    word = known.quoted_userinfo.sub("***", known.userinfo.sub("***@", word))
    return known.secret_option.sub(r"\1***", word)


class Options:
    """Reads a URL's options by type; `finish()` complains about what nobody asked for."""

    def __init__(self, url: StoreURL) -> None:
        self._url = url
        self.known: list[str] = []

    def size(self, name: str, default: int) -> int:
        text = self._take(name)
        try:
            return default if text is None else parse_size(text)
        except ConfigError as error:
            raise StoreURLError(f"option {name!r} in {self._url.shown!r}: {error}") from error

    def text(self, name: str, default: str) -> str:
        text = self._take(name)
        return default if text is None else text

    def integer(self, name: str, default: int) -> int:
        text = self._take(name)
        value = default if text is None else whole_number(text)
        if value is None:
            raise self._wrong(name, "a whole number, such as 7")
        return value

    def number(self, name: str, default: float, *, maximum: float = float("inf")) -> float:
        text = self._take(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= maximum:
            raise self._wrong(name, f"a number from 0 to {maximum:g}")
        return value

    def finish(self) -> None:
        unknown = sorted(set(self._url.options) - set(self.known))
        if unknown:
            valid = ", ".join(sorted(self.known)) or "none"
            # Nobody knows what is no secret in them.
            place = self._url.shown.partition("?")[0]
            raise StoreURLError(
                f"unknown option {unknown[0]!r} of {place!r}: valid options are {valid}"
            )

    def _take(self, name: str) -> str | None:
        self.known.append(name)
        return self._url.options.get(name)

    def _wrong(self, name: str, expected: str) -> StoreURLError:
        return StoreURLError(f"option {name!r} in {self._url.shown!r} must be {expected}")


def whole_number(text: str) -> int | None:
    """None: it is none, or one that nothing here can be."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def parse_url(text: str, *, must_exist: bool = False) -> StoreURL:
    if "://" not in text:  # it may also be what stands behind a blank in a password
        shown = f"***@{text.rpartition('@')[2]}" if "@" in text else text
        raise StoreURLError(
            f"{shown!r} is not a store URL: write scheme://..., with a blank as %20, such as "
            "file:///var/cache/quire"
        )
    if "\0" in unquote(text):
        raise StoreURLError(f"{redact(text)!r} holds a NUL: leave it out")
    try:
        parts = urlsplit(text)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise StoreURLError(
            f"{redact(text)!r} is not a store URL: write options as ?name=value&name=value"
        ) from None  # it may quote what is secret
    options = dict(pairs)
    if len(options) != len(pairs):
        raise StoreURLError(f"{redact(text)!r} gives an option twice: give each option once")
    if parts.fragment:
        raise StoreURLError(
            f"{redact(text)!r} holds a '#': write it as %23 if it is part of the path"
        )
    scheme, _, inner = parts.scheme.partition("+")
    return StoreURL(
        text, scheme, inner, parts.netloc, unquote(parts.path), options, must_exist=must_exist
    )


def split_urls(text: str) -> list[StoreURL]:
    """Of one store, or of several in front of each other: URLs with blanks between them."""
    return [parse_url(each) for each in text.split()] or [parse_url(text)]


def open_store(text: str, *, must_exist: bool = False) -> Store:
    """Open the store a URL names. Raises StoreURLError or StoreError: one sentence with the fix."""
    url = parse_url(text, must_exist=must_exist)
    return opener_of(url)(url)


def opener_of(url: StoreURL) -> Callable[[StoreURL], Store]:
    """What opens stores of its scheme. Raises as `open_store`."""
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if url.scheme not in known:
        raise StoreURLError(
            f"unknown store scheme {url.scheme!r} in {url.shown!r}: "
            f"known schemes are {', '.join(sorted(known)) or 'none (is quire installed?)'}"
        )
    try:
        opener: Callable[[StoreURL], Store] = known[url.scheme].load()
    except (ImportError, AttributeError) as error:
        raise StoreError(
            f"the plug-in for {url.scheme!r} stores cannot be loaded ({error}): "
            f"{_what_it_needs(known, url.scheme)}"
        ) from error
    return opener


def _what_it_needs(known: Mapping[str, EntryPoint], scheme: str) -> str:
    """What to install: its package has an extra that goes by the scheme, or by another that the
    same function opens."""
    entry = known[scheme]
    if entry.dist is None:
        return "install what it needs"
    extras = set(entry.dist.metadata.get_all("Provides-Extra", []))
    alike = {name for name, other in known.items() if other.value == entry.value}
    for extra in extras & alike:
        return f"pip install '{entry.dist.name}[{extra}]'"
    return "install what it needs"
