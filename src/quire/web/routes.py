"""What a router and its servers say to each other, and how a server knows that it is the router.

A server says that it is there, again and again, and when it goes: a router that was started anew
knows nobody. A router that cannot be reached is tried again, and said once. What the server is, the
router asks.

The router's key follows from the admin key and opens less: what a router asks (`/admin/info`,
`/admin/events`, `/admin/keys`), and the two things it says of a request, where its prompt is to be
computed and that the client's key was looked at. No key travels with a request, but a signature of
what is said, for a short time. Whoever reads it learns no key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

import httpx
import msgspec

PREFILL_HEADER = "x-quire-prefill"
ROUTE_HEADER = "x-quire-route"
PREFILLER_HEADER = "x-prefiller-host-port"
"""Of llm-d's: host and port of the server that is to compute the prompt. Nobody signs it."""
CLIENT_HEADER = "x-quire-client"
"""To `/admin/keys`: what the client sent as `Authorization`, for a tenant's keys are its own."""

JOIN, LEAVE = "/router/join", "/router/leave"

_VALID_S = 300
"""Clocks of servers differ."""
_EVERY_S = 5.0
_TIMEOUT_S = 5.0

logger = logging.getLogger("quire.server")


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


# ---- enrolment -----------------------------------------------------------------------------------


class Enrolment(msgspec.Struct, frozen=True):
    """What a server says to a router."""

    url: str
    """0.0.0.0 or ::, as its host: where it says it from."""
    role: str = ""


@contextlib.asynccontextmanager
async def enrolled(
    routers: Sequence[str],
    enrolment: Enrolment,
    admin_key: str | None,
    *,
    client: httpx.AsyncClient | None = None,
    every_s: float = _EVERY_S,
) -> AsyncIterator[asyncio.Event]:
    """Known to the routers, until the block is left or the event is set: then it says that it
    goes."""
    leaving = asyncio.Event()
    if not routers:
        yield leaving
        return
    key = router_key(admin_key) if admin_key is not None else ""
    body = msgspec.json.encode(enrolment)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}

    async with client or httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:

        async def tell(router: str, path: str) -> str:
            """What is wrong."""
            try:
                answer = await http.post(router + path, content=body, headers=headers)
            except httpx.HTTPError as error:
                return f"it cannot be reached ({type(error).__name__})"
            return "" if answer.status_code == 200 else f"it answered {answer.status_code}"

        async def keep(router: str) -> None:
            said = ""
            while not leaving.is_set():
                wrong = await tell(router, JOIN)
                if wrong != said:
                    logger.warning("router %s: %s", router, wrong or "it knows this server now")
                said = wrong
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(leaving.wait(), every_s)
            await tell(router, LEAVE)

        tasks = [asyncio.create_task(keep(router)) for router in routers]
        try:
            yield leaving
        finally:
            leaving.set()
            await asyncio.gather(*tasks, return_exceptions=True)
