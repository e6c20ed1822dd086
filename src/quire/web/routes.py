"""What a router may say to a server, and how the server knows that it is the router.

The router's key follows from the admin key and opens less: what a router asks (`/admin/info`,
`/admin/events`, `/admin/keys`), and the two things it says of a request, where its prompt is to be
computed and that the client's key was looked at. No key travels with a request, but a signature of
what is said, for a short time. Whoever reads it learns no key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import NamedTuple

PREFILL_HEADER = "x-quire-prefill"
ROUTE_HEADER = "x-quire-route"
CLIENT_HEADER = "x-quire-client"
"""To `/admin/keys`: what the client sent as `Authorization`, for a tenant's keys are its own."""

_VALID_S = 300
"""Clocks of servers differ."""


class RouterNote(NamedTuple):
    """What a router says of a request."""

    prefill: str = ""
    """Prefill servers, with commas between."""
    vouches: bool = False
    """It has seen the client's key, which is right."""


def router_key(admin_key: str) -> str:
    return _mac(admin_key, "quire router")


def signed(note: RouterNote, key: str, now: float) -> dict[str, str]:
    """Headers. `key`: the router's."""
    time, vouches = str(int(now)), str(int(note.vouches))
    headers = {ROUTE_HEADER: f"{time}.{vouches}.{_mac(key, time, vouches, note.prefill)}"}
    return headers | {PREFILL_HEADER: note.prefill} if note.prefill else headers


def read_note(headers: Mapping[str, str], admin_key: str | None, now: float) -> RouterNote | None:
    """What the router has said; None: nothing that is signed by it."""
    prefill = headers.get(PREFILL_HEADER, "")
    time, _, rest = headers.get(ROUTE_HEADER, "").partition(".")
    vouches, _, mac = rest.partition(".")
    if admin_key is None or not (time.isascii() and time.isdigit() and len(time) < 12):
        return None
    expected = _mac(router_key(admin_key), time, vouches, prefill)
    given = mac.encode("latin-1", "replace")
    if not hmac.compare_digest(expected.encode(), given) or abs(now - int(time)) > _VALID_S:
        return None
    return RouterNote(prefill, vouches == "1")


def _mac(key: str, *parts: str) -> str:
    text = "\n".join(parts).encode("utf-8", "surrogateescape")
    return hmac.new(key.encode(), text, hashlib.sha256).hexdigest()
