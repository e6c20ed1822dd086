"""Who calls, and whose pages a request is about.

A client has the server's own key, or one of a file of keys by tenant:

    # name  key
    alice   sk-alice-…
    bob     sk-bob-…

What a tenant's requests cache is its own: no other shares it, whatever `cache_salt` says, and its
salts count together. Knows headers, keys and salts.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.errors import ConfigError
from quire.server.errors import ApiError
from quire.types import TENANT_MARK

_NAME = re.compile(r"[!-~]{1,64}")
_MAX_BYTES = 1 << 20


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
