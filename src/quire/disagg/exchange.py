"""Exchange: an engine's part in giving and taking pages; puts hub, asker and holder together.

Once per step, in this order: `hear` takes in what peers have said, `advance` decides, and `tell`
says what there is to say, after the workers were told. Nothing here waits.
"""

from __future__ import annotations

from typing import Protocol

from quire.disagg.asker import Asker
from quire.disagg.holder import Holder
from quire.peer.hub import Connected, Disconnected, HubEvent, Received
from quire.peer.messages import (
    Abort,
    Ask,
    Beat,
    Complete,
    Done,
    Offer,
    PeerMessage,
    Refused,
    Repair,
    Wait,
)


class Hub(Protocol):
    """What is needed of PeerHub."""

    address: str

    @property
    def strangers(self) -> int:
        """Connections that did not get through the handshake."""

    def connect(self, address: str) -> None: ...

    def send(self, link: str, message: PeerMessage) -> bool: ...

    def poll(self) -> list[HubEvent]: ...

    def close(self) -> None: ...


class Exchange:
    def __init__(self, hub: Hub, asker: Asker, holder: Holder) -> None:
        self.hub = hub
        self.asker = asker
        self.holder = holder
        self.links: dict[str, str] = {}
        """How the lines to the peers that we know by address stand."""

    def hear(self) -> None:
        for event in self.hub.poll():
            match event:
                case Connected(link, hello):
                    self.links[link] = "connected"
                    self.asker.connected(link, hello)
                case Disconnected(link, reason):
                    self.links[link] = reason
                    if link.startswith("in-"):
                        del self.links[link]
                    self.asker.disconnected(link, reason)
                    self.holder.disconnected(link)
                case Received(link, message):
                    self._received(link, message)

    def advance(self) -> None:
        self.asker.advance()
        self.holder.advance()

    def tell(self) -> None:
        self.holder.flush()

    @property
    def busy(self) -> bool:
        """Is there anything that should not wait?"""
        return bool(self.asker.open or self.holder.open)

    def close(self) -> None:
        self.hub.close()

    def _received(self, link: str, message: PeerMessage) -> None:
        match message:
            case Ask() | Repair() | Done() | Abort():
                self.holder.received(link, message)
            case Offer() | Complete() | Refused():
                self.asker.received(link, message)
            case Wait():  # whoever knows it by its name
                self.asker.received(link, message)
                self.holder.received(link, message)
            case Beat():
                pass
