"""Who may do what: API keys and the admin's door.

/admin needs the admin key, wherever a request comes from: from this machine too, since a proxy on
it, or a web page in a browser on it, comes from there as well. A server without a key has no admin;
`quire serve` makes one where none is given (keyfile.py).

A router has a key of its own, which opens less: routes.py.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from quire.errors import ConfigError
from quire.server.addresses import parse_peers
from quire.server.callers import bearer, unauthorized
from quire.server.errors import ApiError, invalid
from quire.server.routes import PREFILL_HEADER, ROUTE_HEADER, Route, router_key
from quire.store.url import redact


def check_key(headers: Mapping[str, str], key: str) -> None:
    """Raises ApiError unless the bearer of the request has `key`."""
    if not hmac.compare_digest(bearer(headers), key.encode()):
        raise unauthorized("the API key is not the one this server expects")


def check_admin(headers: Mapping[str, str], admin_key: str | None) -> None:
    """Raises ApiError unless this is the admin."""
    if admin_key is None:
        raise ApiError(
            403,
            "this server has no admin key, so nobody can use /admin: start it with admin_key",
            code="admin_forbidden",
        )
    check_key(headers, admin_key)


def check_router(headers: Mapping[str, str], admin_key: str | None) -> None:
    """Raises ApiError unless this is a router, or the admin."""
    if admin_key is not None:
        given = headers.get("authorization", "")
        expected = f"Bearer {router_key(admin_key)}"
        if hmac.compare_digest(given.encode("latin-1", "replace"), expected.encode()):
            return
    check_admin(headers, admin_key)


def prefill_of(
    headers: Mapping[str, str], route: Route | None, *, is_decode: bool
) -> Sequence[str]:
    """The prefill servers that a request names; none if it names none. `route`: what a router has
    said of it. Raises ApiError."""
    text = headers.get(PREFILL_HEADER)
    if text is None:
        return ()
    if route is None:
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
