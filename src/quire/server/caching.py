"""What a request may say about the pages of its prompt, and whose they are.

    cache                    retain_s, priority, tokens, tiers, store
    prompt_cache_retention   OpenAI's words for a retain_s

Knows fields and what they mean for the engine; what becomes of it the cache decides. A tenant is
who shares an API key of its own (callers.py) or a `cache_salt`; those with neither are one tenant,
with nothing to limit it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from quire.engine.messages import CacheWish
from quire.server.errors import overloaded
from quire.server.forms import wrong
from quire.server.messages import Body
from quire.types import tenant_of

MAX_RETAIN_S = 7 * 86400
MAX_TOKENS = 2**31 - 1
_DEFAULT_RETAIN_S = 300.0
_RETENTIONS = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86400.0}


class CacheControl(Body):
    retain_s: Annotated[float, Field(ge=0, le=MAX_RETAIN_S)] | None = None
    """Seconds after the request for which its prompt is kept before what others have not asked to
    be kept."""
    priority: Annotated[int, Field(ge=-1, le=2)] | None = None
    """−1: it goes first; 2: it is kept before what has 1."""
    tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """The first so many of the prompt; all of it, if not given."""
    tiers: (
        Annotated[list[Literal["device", "host", "store"]], Field(min_length=1, max_length=3)]
        | None
    ) = None
    """Where it is kept."""
    store: bool | None = None
    """False: it is not written to the store."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.store is False and self.tiers and "store" in self.tiers:
            raise wrong("names the store, and store is false", param="tiers")
        if self.priority is not None and self.priority <= 0 and self.retain_s:
            raise wrong("is for what is kept: leave it out", param="retain_s")
        return self


def wish_of(cache: CacheControl | None, retention: str | None) -> CacheWish | None:
    """None: nothing is asked for."""
    if cache is None:
        retain_s = _RETENTIONS.get(retention or "", 0.0)
        return CacheWish(retain_s, 1) if retain_s else None
    level = cache.priority
    if level is None:
        level = 1 if cache.retain_s else 0
    retain_s = cache.retain_s or (_DEFAULT_RETAIN_S if level > 0 else 0.0)
    tiers = cache.tiers or ["device", "host", "store"]
    return CacheWish(
        retain_s,
        level,
        cache.tokens,
        device="device" in tiers,
        host="host" in tiers,
        store="store" in tiers and cache.store is not False,
    )


class Tenants:
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
