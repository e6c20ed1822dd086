"""Membership: servers that come to a router by themselves, and leave it.

    server ──join, every few seconds──▶ in the fleet ──leave, or down for long──▶ gone

Who may come shows the router's key, which follows from the admin key (server/routes.py): the one
this router was given, or the one that the server wrote on this machine. Knows addresses and keys;
what a server is, the fleet finds out by asking it.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

import msgspec

from quire.decoders import json_decoder
from quire.errors import ConfigError
from quire.peer.address import join_address
from quire.router.config import parse_urls
from quire.router.fleet import Fleet, MemberSide
from quire.web.errors import ApiError
from quire.web.keyfile import find_key
from quire.web.routes import Enrolment, router_key

_MAX_MEMBERS = 1024
_ANY_HOST = ("0.0.0.0", "::")
_SIDES = {"prefill": MemberSide.PREFILL, "decode": MemberSide.DECODE, "unified": MemberSide.SERVER}


class Membership:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def join(self, content: bytes, shown: str | None, host: str) -> None:
        """`shown`: the key; `host`: from where it comes. Raises ApiError."""
        enrolment = self._read(content, shown, host)
        side = _SIDES.get(enrolment.role)
        if side is None:
            raise ApiError(400, "role is prefill, decode or unified", param="role")
        if len(self._fleet.members) >= _MAX_MEMBERS:
            raise ApiError(503, f"there are {_MAX_MEMBERS} servers already", code="fleet_full")
        await self._fleet.add(enrolment.url, side)

    async def leave(self, content: bytes, shown: str | None, host: str) -> None:
        """Raises ApiError."""
        self._fleet.remove(self._read(content, shown, host).url)

    def _read(self, content: bytes, shown: str | None, host: str) -> Enrolment:
        try:
            found = json_decoder(Enrolment).decode(content)
            (url,) = parse_urls([found.url])
        except (msgspec.DecodeError, ConfigError, ValueError) as error:
            raise ApiError(400, f"this names no server: {error}") from None
        if urlsplit(url).hostname in _ANY_HOST:
            url = join_address("http", host, urlsplit(url).port)
        config = self._fleet.config
        key = config.admin_key or find_key(url, config.admin_key_file)
        expected = f"Bearer {router_key(key)}" if key is not None else None
        if expected is None or not hmac.compare_digest(
            expected.encode(), (shown or "").encode("latin-1", "replace")
        ):
            raise ApiError(
                401,
                "this router does not know the server: give both the same admin_key",
                code="not_a_member",
            )
        return msgspec.structs.replace(found, url=url)
