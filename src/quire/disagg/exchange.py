"""Exchange: an engine's part in giving and taking pages; puts hub, receiver and giver together.

Once per step, in this order: `hear` takes in what peers have said, `advance` decides, and `tell`
says what there is to say, after the workers were told. Nothing here waits.
"""

from __future__ import annotations

from typing import Protocol

from quire.disagg.giving import Giver
from quire.disagg.receiving import Receiver
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
    Skip,
    Wait,
)


class Hub(Protocol):
    """What is needed of PeerHub."""

    address: str

    @property
    def strangers(self) -> int:
        """Connections that did not get through the handshake."""

    def connect(self, address: str) -> None: ...

    def disconnect(self, address: str) -> None: ...

    def send(self, link: str, message: PeerMessage) -> bool: ...

    def poll(self) -> list[HubEvent]: ...

    def close(self) -> None: ...


class Exchange:
    def __init__(self, hub: Hub, receiver: Receiver, giver: Giver) -> None:
        self.hub = hub
        self.receiver = receiver
        self.giver = giver

    def hear(self) -> None:
        for event in self.hub.poll():
            match event:
                case Connected(link, hello, transport):
                    self.receiver.connected(link, hello, transport)
                case Disconnected(link, reason):
                    self.receiver.disconnected(link, reason)
                    self.giver.disconnected(link)
                case Received(link, message):
                    self._received(link, message)

    def advance(self) -> None:
        self.receiver.advance()
        self.giver.advance()

    def tell(self) -> None:
        self.giver.flush()

    @property
    def links(self) -> dict[str, str]:
        """How the lines to the peers that we know by address stand."""
        return self.receiver.contacts.states()

    @property
    def transports(self) -> dict[str, str]:
        """By which pages of the peers that are there are read."""
        return self.receiver.contacts.transports()

    def next_deadline(self) -> float | None:
        """When something is due though nothing is heard of anybody; None: never."""
        times = [self.receiver.next_deadline(), self.giver.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    @property
    def busy(self) -> bool:
        """Is there anything that should not wait?"""
        return bool(self.receiver.open or self.giver.open)

    def close(self) -> None:
        self.hub.close()

    def _received(self, link: str, message: PeerMessage) -> None:
        match message:
            case Ask() | Skip() | Repair() | Done() | Abort():
                self.giver.received(link, message)
            case Offer() | Complete() | Refused():
                self.receiver.received(link, message)
            case Wait():  # whoever knows it by its name
                self.receiver.received(link, message)
                self.giver.received(link, message)
            case Beat():
                pass
