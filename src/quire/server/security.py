"""Who may do what: API keys, the admin's door, and what must not be shown.

/admin needs the admin key, wherever a request comes from: from this machine too, since a proxy on
it, or a web page in a browser on it, comes from there as well. A server without a key has no admin;
`quire serve` makes one where none is given (keyfile.py).

The same key is needed for `x-quire-prefill`, by which a router says where a prompt is to be
computed. There the bearer is the client's, so the admin's key has a header of its own.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence

from quire.errors import ConfigError
from quire.server.addresses import parse_peers
from quire.server.errors import ApiError, invalid

PREFILL_HEADER = "x-quire-prefill"
ADMIN_KEY_HEADER = "x-quire-admin-key"

# User and password, also where a password holds a raw slash; and options that sound secret.
_USERINFO = re.compile(r"(?<=://)(?:[^/\s'\"?#@]*|[^\s'\"@]*:[^\s'\"]*)@")
_SECRET_OPTION = re.compile(
    r"([?&][^=&\s'\"]*(?:pass|secret|token|key|credential|signature)[^=&\s'\"]*=)[^&\s'\"]*",
    re.IGNORECASE,
)


def check_key(headers: Mapping[str, str], key: str) -> None:
    """Raises ApiError unless the bearer of the request has `key`."""
    given = headers.get("authorization")
    if given is None:
        raise _unauthorized("no API key was given: send it as 'Authorization: Bearer KEY'")
    scheme, _, token = given.partition(" ")
    # As bytes: compare_digest takes no str beyond ASCII. Headers are decoded as Latin-1.
    if scheme.lower() != "bearer" or not hmac.compare_digest(
        token.strip().encode("latin-1", "replace"), key.encode()
    ):
        raise _unauthorized("the API key is not the one this server expects")


def check_admin(headers: Mapping[str, str], admin_key: str | None) -> None:
    """Raises ApiError unless this is the admin."""
    if admin_key is None:
        raise ApiError(
            403,
            "this server has no admin key, so nobody can use /admin: start it with admin_key",
            code="admin_forbidden",
        )
    check_key(headers, admin_key)


def prefill_of(
    headers: Mapping[str, str], admin_key: str | None, *, is_decode: bool
) -> Sequence[str]:
    """The prefill servers that a request names; none if it names none. Raises ApiError."""
    text = headers.get(PREFILL_HEADER)
    if text is None:
        return ()
    try:
        given = headers.get(ADMIN_KEY_HEADER)
        check_admin({"authorization": f"Bearer {given}"} if given else {}, admin_key)
    except ApiError as error:
        fix = f"send the admin key as {ADMIN_KEY_HEADER}"
        raise ApiError(
            403,
            f"{PREFILL_HEADER} is for routers that this server trusts: "
            f"{fix if admin_key else 'start it with admin_key, and ' + fix}",
            code="prefill_forbidden",
        ) from error
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


def redact(text: str) -> str:
    """Any text without the credentials of the URLs in it."""
    return _SECRET_OPTION.sub(r"\1***", _USERINFO.sub("***@", text))


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
