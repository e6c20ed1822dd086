"""Who may do what: API keys and the admin's door.

/admin needs the admin key, wherever a request comes from: from this machine too, since a proxy on
it, or a web page in a browser on it, comes from there as well. A server without a key has no admin;
`quire serve` makes one where none is given (keyfile.py).

A router has a key of its own, which opens less: routes.py. A client has the server's own key, or
one of a file of keys by tenant:

    # name  key
    alice   sk-alice-…
    bob     sk-bob-…
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from quire.errors import ConfigError
from quire.web.errors import ApiError
from quire.web.routes import router_key

_NAME = re.compile(r"[!-~]{1,64}")
_MAX_BYTES = 1 << 20


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


def bearer(headers: Mapping[str, str]) -> bytes:
    """The key that was sent. Raises ApiError."""
    given = headers.get("authorization")
    if given is None:
        raise unauthorized("no API key was given: send it as 'Authorization: Bearer KEY'")
    scheme, _, token = given.partition(" ")
    if scheme.lower() != "bearer":
        raise unauthorized("the API key is not the one this server expects")
    # As bytes: compare_digest takes no str beyond ASCII. Headers are decoded as Latin-1.
    return token.strip().encode("latin-1", "replace")


def tenant_by_key(
    headers: Mapping[str, str], api_key: str | None, tenants: Mapping[str, str]
) -> str:
    """Whose key was sent; empty: the server's own, or nobody needs one. Raises ApiError."""
    if api_key is None and not tenants:
        return ""
    given, found = bearer(headers), None
    for name, key in [("", api_key), *tenants.items()]:
        # All of them: how long it takes says nothing about which it is.
        if key is not None and hmac.compare_digest(given, key.encode()):
            found = name
    if found is None:
        raise unauthorized("the API key is not one that this server expects")
    return found


def read_tenants(file: Path) -> dict[str, str]:
    """Keys by name. Raises ConfigError."""
    try:
        with file.open("rb") as reading:
            text = reading.read(_MAX_BYTES + 1)
        lines = text.decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tenant_keys cannot be read from {str(file)!r}: {error}") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{file} is larger than {_MAX_BYTES} bytes: too many tenant_keys")
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not all(map(str.isprintable, words)):
            raise ConfigError(
                f"{file}, line {number}: write a name and a key, with a space between"
            )
        name, key = words
        if not _NAME.fullmatch(name) or name in found or key in found.values():
            raise ConfigError(
                f"{file}, line {number}: names have up to 64 characters, and no name or key is "
                "there twice"
            )
        found[name] = key
    if not found:
        raise ConfigError(f"{file} holds no keys: write a name and a key in each line")
    return found


def unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
