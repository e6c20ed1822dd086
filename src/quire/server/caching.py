"""What a request may say about the pages of its prompt, and whose they are.

    cache                    retain_s, priority, from, tokens, tiers, store; or ranges of these
    prompt_cache_retention   OpenAI's words for a retain_s

Knows fields and what they mean for the engine; what becomes of it the cache decides. A tenant is
who shares an API key of its own (callers.py) or a `cache_salt`; those with neither are one tenant,
with nothing to limit it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

import msgspec
from pydantic import ConfigDict, Field, JsonValue, model_validator

from quire.engine.messages import CacheWish
from quire.text.shapes import Body, wrong
from quire.types import tenant_of
from quire.web.errors import overloaded

MAX_RETAIN_S = 7 * 86400
MAX_TOKENS = 2**30
MAX_RANGES = 16
_DEFAULT_RETAIN_S = 300.0
_RETENTIONS = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86400.0}


class CacheRange(Body):
    """Of a prompt, or a range of it."""

    retain_s: Annotated[float, Field(ge=0, le=MAX_RETAIN_S)] | None = None
    """Seconds after the request for which it is kept before what others have not asked to be
    kept."""
    priority: Annotated[int, Field(ge=-1, le=2)] | None = None
    """−1: it goes first; 2: it is kept before what has 1."""
    first: Annotated[Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None, Field(alias="from")] = None
    """The token that it begins with: by default where the range before it ends."""
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """How many there are; all up to the end of the prompt, if not given."""
    tiers: (
        Annotated[list[Literal["device", "host", "store"]], Field(min_length=1, max_length=3)]
        | None
    ) = None
    """Where it is kept."""
    store: bool | None = None
    """False: it is not written to the store, nor is what follows it."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.store is False and self.tiers and "store" in self.tiers:
            raise wrong("names the store, and store is false", param="tiers")
        if self.priority is not None and self.priority <= 0 and self.retain_s:
            raise wrong("is for what is kept: leave it out", param="retain_s")
        return self

    @property
    def names_store(self) -> bool | None:
        """None: it says nothing of it."""
        return self.store if self.tiers is None else "store" in self.tiers


_NOTHING_BESIDE: list[JsonValue] = [
    {"properties": {"ranges": {"type": "null"}}},
    {
        "properties": {
            field.alias or name: {"type": "null"} for name, field in CacheRange.model_fields.items()
        }
    },
]


class CacheControl(CacheRange):
    model_config = ConfigDict(json_schema_extra={"anyOf": _NOTHING_BESIDE})

    ranges: Annotated[list[CacheRange], Field(min_length=1, max_length=MAX_RANGES)] | None = None
    """In the order of the prompt; then nothing is said beside them."""

    @model_validator(mode="after")
    def _ranges_follow_each_other(self) -> Self:
        if self.ranges is None:
            return self
        if any(getattr(self, name) is not None for name in CacheRange.model_fields):
            raise wrong(
                "is there, and so are other fields: say those in its ranges", param="ranges"
            )
        at, is_stored = 0, True
        for number, (first, last, each) in enumerate(_places(self.ranges)):
            name = f"ranges.{number}"
            if first < at:
                raise wrong(
                    f"is before token {at}, where the last range ends", param=f"{name}.from"
                )
            if last is None and each is not self.ranges[-1]:
                raise wrong("is missing: only the last range has no end", param=f"{name}.tokens")
            if each.names_store and not is_stored:
                raise wrong(
                    "names the store, which has nothing of the range before: a page is of no use "
                    "there without those before it",
                    param=name,
                )
            is_stored = is_stored and each.names_store is not False
            at = first if last is None else last
        return self


def wish_of(cache: CacheControl | None, retention: str | None) -> CacheWish | None:
    """None: nothing is asked for."""
    if cache is None:
        retain_s = _RETENTIONS.get(retention or "", 0.0)
        return CacheWish(retain_s, 1) if retain_s else None
    wish, ranges = None, cache.ranges or [cache]
    for first, last, each in reversed(list(_places(ranges))):
        wish = msgspec.structs.replace(_wish_of(each, last), then=wish)
        if each.first is not None and first > 0:  # of what lies before it nothing is asked
            wish = CacheWish(num_tokens=first, then=wish)
    return wish


def _places(ranges: Sequence[CacheRange]) -> Iterator[tuple[int, int | None, CacheRange]]:
    """Where each begins and ends, in tokens; None: with the prompt."""
    at = 0
    for each in ranges:
        first = at if each.first is None else each.first
        last = None if each.tokens is None else first + each.tokens
        yield first, last, each
        at = first if last is None else last


def _wish_of(cache: CacheRange, last: int | None) -> CacheWish:
    level = cache.priority
    if level is None:
        level = 1 if cache.retain_s else 0
    retain_s = cache.retain_s or (_DEFAULT_RETAIN_S if level > 0 else 0.0)
    tiers = cache.tiers or ["device", "host", "store"]
    return CacheWish(
        retain_s,
        level,
        last,
        device="device" in tiers,
        host="host" in tiers,
        store="store" in tiers and cache.store is not False,
    )


class TenantCounts:
    """How many requests each tenant has in flight."""

    def __init__(self, most: int) -> None:
        """`most`: of one tenant; 0: any number."""
        self._most = most
        self._numbers: dict[str, int] = {}

    def enter(self, salt: str, count: int) -> None:
        """Raises ApiError."""
        name = tenant_of(salt)
        number = self._numbers.get(name, 0) + count
        if name and self._most and number > self._most:
            raise overloaded(
                f"this tenant has {number - count} requests in flight, of {self._most} "
                "(tenant_requests): try again later",
                "tenant_full",
            )
        self._numbers[name] = number

    def leave(self, salt: str, count: int) -> None:
        name = tenant_of(salt)
        self._numbers[name] -= count
        if not self._numbers[name]:
            del self._numbers[name]

    def __getitem__(self, name: str) -> int:
        return self._numbers.get(name, 0)

    @property
    def names(self) -> list[str]:
        return list(self._numbers)
