"""Names: servers that are found by DNS. Each address of a name is one, and comes and goes with it.

    dns://decode:8000 ──looked up, every few seconds──▶ http://10.0.0.5:8000, http://10.0.0.6:8000

Knows names and addresses; what a server is, the fleet finds out by asking it. A name that cannot be
looked up changes nothing: who is down is seen by asking.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from quire.peer.address import join_address
from quire.router.config import is_name
from quire.router.fleet import Fleet, MemberSide

Lookup = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host that has this port. Raises OSError."""

logger = logging.getLogger("quire.router")


async def lookup(host: str, port: int) -> list[str]:
    """As the system does it."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(where[0]) for *_, where in found]


class Names:
    def __init__(self, fleet: Fleet, look: Lookup = lookup) -> None:
        self._fleet = fleet
        self._look = look
        sides = {MemberSide.PREFILL: fleet.config.prefill, MemberSide.DECODE: fleet.config.decode}
        sides[MemberSide.SERVER] = fleet.config.servers
        self._names = [(url, side) for side, urls in sides.items() for url in urls if is_name(url)]
        self._known: dict[str, set[str]] = {name: set() for name, _ in self._names}
        """URLs of servers, by name."""
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look each up once, and then again and again."""
        if self._names:
            await self._look_all()
            self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._fleet.config.names_interval_s)
            await self._look_all()

    async def _look_all(self) -> None:
        await asyncio.gather(*(self._look_up(name, side) for name, side in self._names))

    async def _look_up(self, name: str, side: MemberSide) -> None:
        where = urlsplit(name)
        assert where.hostname is not None
        assert where.port is not None
        try:
            async with asyncio.timeout(self._fleet.config.check_timeout_s):
                found = await self._look(where.hostname, where.port)
        except (OSError, TimeoutError) as error:
            logger.warning("%s cannot be looked up: %s", name, error or "no answer")
            return
        urls = {join_address("http", address, where.port) for address in found}
        gone, self._known[name] = self._known[name] - urls, urls
        for url in gone - set().union(*self._known.values()):
            self._fleet.remove(url)
        # Also those that were forgotten meanwhile: DNS says that they should be there.
        await asyncio.gather(*(self._fleet.add(url, side) for url in urls))
