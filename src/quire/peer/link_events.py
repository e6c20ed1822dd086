"""What a leader says of itself to others, and what it hears of its links to them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.messages import PeerPart
from quire.peer.address import with_host
from quire.peer.identity import Identity
from quire.peer.messages import PeerMessage


class Hello(msgspec.Struct, frozen=True):
    """What a leader says of itself."""

    identity: Identity
    epoch: str
    """Random, new at every start of the engine."""
    role: str = ""
    parts: list[PeerPart] = []
    """Its page servers, one per rank."""

    def seen_from(self, host: str) -> Hello:
        """With `host`, from where it was said, in addresses that name none."""
        parts = [
            msgspec.structs.replace(part, address=with_host(part.address, host))
            for part in self.parts
        ]
        return msgspec.structs.replace(self, parts=parts)


@dataclass(frozen=True, slots=True)
class Connected:
    link: str
    hello: Hello
    transport: str = "tcp"
    """By which its pages are read."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A link is gone, or could not be made."""

    link: str
    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    link: str
    message: PeerMessage


HubEvent = Connected | Disconnected | Received
