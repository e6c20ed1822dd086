"""Who may do what: API keys, the admin's door, and what must not be shown.

Without an admin key, /admin is open to this machine only, and only to a program on it:

    the peer is a loopback address          nobody from outside
    no forwarding header                    nobody from outside through a proxy on this machine
    Host names this machine                 no web page whose name was rebound to 127.0.0.1
    Origin, if any, is this server          no other web page in a browser on this machine

With a key, the key is all that counts.

The same door is before `x-quire-prefill`, by which a router says where a prompt is to be computed.
There the bearer is the client's, so the admin's key has a header of its own.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from quire.errors import ConfigError
from quire.server.addresses import parse_peers
from quire.server.errors import ApiError, invalid

PREFILL_HEADER = "x-quire-prefill"
ADMIN_KEY_HEADER = "x-quire-admin-key"

_FORWARDING = ("x-forwarded-for", "forwarded", "x-real-ip", "x-forwarded-host")

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


def check_admin(headers: Mapping[str, str], peer: str | None, admin_key: str | None) -> None:
    """Raises ApiError unless this is the admin."""
    if admin_key is not None:
        check_key(headers, admin_key)
        return
    if not is_loopback(peer):
        raise _forbidden("is reached only from this machine")
    if any(name in headers for name in _FORWARDING):
        raise _forbidden("is not reached through a proxy")
    host = headers.get("host", "")
    if not _names_this_machine(host):
        raise _forbidden("is reached only under the name localhost or a loopback address")
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host.lower():
        raise _forbidden("is not reached from web pages of others")


def prefill_of(
    headers: Mapping[str, str], peer: str | None, admin_key: str | None, *, is_decode: bool
) -> Sequence[str]:
    """The prefill servers that a request names; none if it names none. Raises ApiError."""
    text = headers.get(PREFILL_HEADER)
    if text is None:
        return ()
    try:
        given = headers.get(ADMIN_KEY_HEADER)
        bearer = {"authorization": f"Bearer {given}"} if given else {}
        check_admin({**headers} | bearer, peer, admin_key)
    except ApiError as error:
        fix = (
            f"set admin_key here and send it as {ADMIN_KEY_HEADER}, or come from this machine"
            if admin_key is None
            else f"send the admin key as {ADMIN_KEY_HEADER}"
        )
        raise ApiError(
            403,
            f"{PREFILL_HEADER} is for routers that this server trusts: {fix}",
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


def is_loopback(host: str | None) -> bool:
    """Whether an address is of this machine; ::ffff:127.0.0.1 is 127.0.0.1."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def redact(text: str) -> str:
    """Any text without the credentials of the URLs in it."""
    return _SECRET_OPTION.sub(r"\1***", _USERINFO.sub("***@", text))


def _names_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or is_loopback(name)


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _forbidden(how: str) -> ApiError:
    return ApiError(
        403,
        f"without an admin key /admin {how}: start the server with one to use it from elsewhere",
        code="admin_forbidden",
    )
