"""What two leaders say to each other about pages: typed, msgpack, nothing else.

    receiver → giver   Ask, Skip, Repair, Wait, Done, Abort, Beat
    giver → receiver   Wait and Offer, any number, then Complete; or Refused

A receiver wants the pages [first, last) of a prompt's prefix; the giver offers them as they become
READY on its host, computing them first if it was asked to. Offered pages stay until Done or Abort,
or until the receiver has not been heard of for too long. The bytes travel elsewhere: page servers
hand them out against the offer's grant.

`id` names one hand-over and is never used again, so that a late, doubled or delayed message finds
either its hand-over or nothing. Every message may come twice.
"""

from __future__ import annotations

import msgspec

from quire.decoders import msgpack_decoder


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    pass


# ---- receiver → giver ---------------------------------------------------------------------------


class Ask(_Message, frozen=True, tag="ask"):
    id: str
    tokens: bytes
    """Of pages [0, last): little-endian int32."""
    salt: str
    first: int
    last: int
    """In pages; first == last asks for nothing but a word."""
    compute: bool
    """True: compute what is not there. False: offer only what is."""
    timeout_s: float
    priority: int = 0
    trace: str = ""
    """A W3C `traceparent`, if the request is traced."""


class Skip(_Message, frozen=True, tag="skip"):
    """Pages before `first` have been found elsewhere since: they need not be offered."""

    id: str
    first: int


class Repair(_Message, frozen=True, tag="repair"):
    """Pages of the prefix that the receiver had, or was offered, and could not get: offer them."""

    id: str
    number: int
    """Of this repair within the hand-over, from 1."""
    first: int
    last: int
    reason: str


class Done(_Message, frozen=True, tag="done"):
    """The receiver has what it wanted."""

    id: str


class Abort(_Message, frozen=True, tag="abort"):
    """The receiver does not want it any more."""

    id: str


class Beat(_Message, frozen=True, tag="beat"):
    """Still here."""


# ---- giver → receiver ---------------------------------------------------------------------------


class Offer(_Message, frozen=True, tag="offer"):
    """Pages [first, first + count) of a component can be read at index `start` of `grant`."""

    id: str
    component: str
    grant: int
    start: int
    first: int
    count: int
    last: int
    """End of the prefix that will be offered: other state than full pages belongs there."""
    ticket: bytes = b""
    """To be shown by whoever reads the grant."""


class Found(msgspec.Struct, frozen=True):
    """Pages of the prefix that the giver had, by tier, from page 0 on: device, host, store."""

    device: int = 0
    host: int = 0
    store: int = 0


class Complete(_Message, frozen=True, tag="complete"):
    """All up to page `last` has been offered, in `offers` offers; no more will come, except for
    repairs."""

    id: str
    last: int
    offers: int
    found: Found
    repair: int = 0
    """Number of the repair that this answers; 0: the ask itself."""


class Wait(_Message, frozen=True, tag="wait"):
    """From the giver: it is queued, or being computed; there is nothing to offer yet, but there
    will be. From the receiver: it is still reading."""

    id: str
    wait_s: float | None = None
    """How long it will be queued, as far as the giver can tell."""


class Refused(_Message, frozen=True, tag="refused"):
    """There will be nothing (more)."""

    id: str
    reason: str


ToGiver = Ask | Skip | Repair | Wait | Done | Abort | Beat
ToReceiver = Offer | Complete | Wait | Refused
PeerMessage = ToGiver | ToReceiver

_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(PeerMessage)


def encode(message: PeerMessage) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> PeerMessage:
    """Raises msgspec.DecodeError."""
    message: PeerMessage = _decoder.decode(data)
    return message
