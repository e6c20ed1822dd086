"""Who calls, and whose pages a request is about.

What a tenant's requests cache is its own: no other shares it, whatever `cache_salt` says, and its
salts count together. Knows headers, keys and salts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.errors import ConfigError
from quire.store.url import redact
from quire.types import TENANT_MARK
from quire.web.addresses import parse_peers
from quire.web.errors import ApiError, invalid
from quire.web.routes import PREFILL_HEADER, ROUTE_HEADER, RouterNote


class Caller(NamedTuple):
    tenant: str = ""
    """By its key; empty: it has the server's own, or needs none."""
    prefill: Sequence[str] = ()
    """Page servers of prefill servers, if a router has named some."""

    def salt(self, cache_salt: str | None) -> str:
        """Of a request's namespace. A mark no client can send keeps tenants by key apart from those
        by salt."""
        own = cache_salt or ""
        return f"{self.tenant}{TENANT_MARK}{own}" if self.tenant else own


def prefill_of(
    headers: Mapping[str, str], note: RouterNote | None, *, is_decode: bool
) -> Sequence[str]:
    """The prefill servers that a request names; none if it names none. `note`: what a router has
    said of it. Raises ApiError."""
    text = headers.get(PREFILL_HEADER)
    if text is None:
        return ()
    if note is None:
        raise ApiError(
            403,
            f"{PREFILL_HEADER} is for routers that this server trusts: start both with the same "
            f"admin_key; a router signs what it says, as {ROUTE_HEADER}",
            code="prefill_forbidden",
        )
    if not is_decode:
        raise ApiError(
            400,
            f"{PREFILL_HEADER} is for decode servers: start this one with --role decode, or leave "
            "the header out",
            code="wrong_role",
        )
    try:
        return parse_peers(text)
    except ConfigError as error:
        raise invalid(None, f"{PREFILL_HEADER}: {redact(str(error))}") from None
