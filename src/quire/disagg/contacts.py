"""Contacts: the peers that may be asked, by address: who is there, who is not, and since when.

    dialled ──Connected──▶ UP ──Disconnected──▶ LOST ──for too long──▶ GONE
       └──Disconnected, or no answer for too long────────────────────▶ GONE ──Connected──▶ UP

Knows links and what is heard of them; not what is asked of anybody. The addresses of the
configuration are kept; one that only requests name is forgotten when none has named it for long.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from quire.peer.hub import Hello
from quire.peer.messages import PeerMessage

_MAX_CONTACTS = 256
_TIDY_SHARE = 0.25


class Links(Protocol):
    """What is needed of PeerHub."""

    def connect(self, address: str) -> None: ...

    def disconnect(self, address: str) -> None: ...

    def send(self, link: str, message: PeerMessage) -> bool: ...


class ContactState(enum.Enum):
    UP = enum.auto()
    DUE = enum.auto()
    """It was dialled just now, or was there until just now: worth a moment."""
    GONE = enum.auto()


@dataclass(frozen=True, slots=True)
class Patience:
    connect_s: float = 5.0
    """For the first answer of an address."""
    return_s: float = 2.0
    """For one that was there to come back."""
    forget_s: float = 60.0
    """Without being named, before an address is not dialled any more."""


@dataclass(slots=True)
class _Contact:
    is_kept: bool
    named_s: float
    since_s: float
    """Since when it stands as it does."""
    hello: Hello | None = None
    transport: str = ""
    """By which its pages are read."""
    was_up: bool = False
    reason: str = ""
    """Why it is not there."""


class Contacts:
    def __init__(
        self, links: Links, clock: Callable[[], float], patience: Patience | None = None
    ) -> None:
        self.links = links
        self._clock = clock
        self._patience = patience or Patience()
        self._known: dict[str, _Contact] = {}
        self._tidied_s = clock()

    def __len__(self) -> int:
        return len(self._known)

    def name(self, addresses: Iterable[str], *, keep: bool = False) -> None:
        """Somebody wants to ask them."""
        now = self._clock()
        for address in addresses:
            contact = self._known.get(address)
            if contact is None:
                self._known[address] = _Contact(keep, now, now)
                self.links.connect(address)
            else:
                contact.named_s, contact.is_kept = now, contact.is_kept or keep
        if len(self._known) > _MAX_CONTACTS:
            self._forget_oldest()

    def tidy(self, in_use: Callable[[], set[str]]) -> None:
        """Forget those that nobody has named for long; now and then. `in_use`: those asked now."""
        now, forget_s = self._clock(), self._patience.forget_s
        if now - self._tidied_s < forget_s * _TIDY_SHARE:
            return
        self._tidied_s = now
        used = in_use()
        for address, contact in list(self._known.items()):
            if address in used:
                contact.named_s = now
            elif not contact.is_kept and now - contact.named_s > forget_s:
                self._forget(address)

    def connected(self, address: str, hello: Hello, transport: str) -> None:
        contact = self._known.get(address)
        if contact is not None:
            contact.hello, contact.was_up, contact.reason = hello, True, ""
            contact.transport = transport
            contact.since_s = self._clock()

    def disconnected(self, address: str, reason: str) -> None:
        contact = self._known.get(address)
        if contact is None:
            return
        contact.reason = reason
        if contact.hello is not None:
            contact.hello, contact.since_s = None, self._clock()

    def hello(self, address: str) -> Hello | None:
        contact = self._known.get(address)
        return contact.hello if contact is not None else None

    def standing(self, address: str) -> ContactState:
        contact = self._known.get(address)
        if contact is None:
            return ContactState.GONE
        if contact.hello is not None:
            return ContactState.UP
        waited_s, patience = self._clock() - contact.since_s, self._patience
        if contact.was_up:
            return ContactState.GONE if waited_s > patience.return_s else ContactState.DUE
        refused = bool(contact.reason)
        return ContactState.GONE if refused or waited_s > patience.connect_s else ContactState.DUE

    def reason(self, address: str) -> str:
        """Why it is not there."""
        contact = self._known.get(address)
        return (contact.reason if contact is not None else "") or "not reached in time"

    def states(self) -> dict[str, str]:
        """How the line to each of them is, in words."""
        return {
            address: "connected" if contact.hello is not None else contact.reason or "dialled"
            for address, contact in self._known.items()
        }

    def transports(self) -> dict[str, str]:
        """By which the pages of each that is there are read."""
        return {a: c.transport for a, c in self._known.items() if c.hello is not None}

    def _forget_oldest(self) -> None:
        named = {a: c.named_s for a, c in self._known.items() if not c.is_kept}
        if named:
            self._forget(min(named, key=named.__getitem__))

    def _forget(self, address: str) -> None:
        del self._known[address]
        self.links.disconnect(address)
