"""Enrolling with routers: a server says that it is there, again and again, and when it goes.

Said again, because a router that was started anew knows nobody. A router that cannot be reached is
tried again, and said once. Knows HTTP; a router knows the rest by asking.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

import httpx
import msgspec

from quire.web.routes import router_key

JOIN, LEAVE = "/router/join", "/router/leave"
_EVERY_S = 5.0
_TIMEOUT_S = 5.0

logger = logging.getLogger("quire.server")


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
