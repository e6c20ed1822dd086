"""Who is there: both sides of a fresh connection prove that they know the shared secret.

    dialer                                       listener
      Open(version, purpose, nonce)        ──▶
                                           ◀──   Challenge(nonce)
      Proof(HMAC over all so far, card)    ──▶   checks secret, then card
                                           ◀──   Proof(HMAC over all of it, card)
      checks secret, then card
                      ══ TLS, with the secret's certificate on both sides ══
      seal                                 ──▶
                                           ◀──   seal

A card says who one is (an identity, or a whole Hello) and is covered by the proofs. Each proof
covers both nonces and its sender's side, so that none can be replayed or reflected. A stranger who
dials learns a random number and our format version, no more. What follows is hidden and protected
by TLS; the seals tie it to this very handshake. Only where both sides see the other on this machine
pages go without: there is no wire.

No sockets: frames go in and come out, so that blocking and non-blocking users share it. A side
that refuses says why in one sentence; to bytes that make no sense it says nothing.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from quire.decoders import msgpack_decoder
from quire.peer.errors import PeerError
from quire.peer.identity import FORMAT_VERSION, Identity, other_version, why_not

TIMEOUT_S = 5.0
MAX_FRAME_BYTES = 64 << 10
"""Of any frame before both sides are sure of each other."""

_NONCE_BYTES = 32
_MAX_REASON_CHARS = 300


class Objection(NamedTuple):
    """Why a card is refused."""

    reason: str
    """From where we stand."""
    said: str
    """From where the other side stands, whom we tell."""


Check = Callable[[bytes], "Objection | None"]
"""Takes the other side's card. May raise msgspec.DecodeError."""


class Side(enum.Enum):
    DIALER = b"quire peer dialer"
    LISTENER = b"quire peer listener"


class Purpose(enum.StrEnum):
    """What a connection is for; each kind has its own port."""

    CONTROL = "control"
    PAGES = "pages"


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    pass


class Open(_Message, frozen=True, tag="open"):
    version: int
    purpose: Purpose
    nonce: bytes


class Challenge(_Message, frozen=True, tag="challenge"):
    nonce: bytes


class Proof(_Message, frozen=True, tag="proof"):
    mac: bytes
    card: bytes
    is_local: bool
    """The other side is on this machine, and what follows may be read and written here."""


class Refuse(_Message, frozen=True, tag="refuse"):
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgpack_decoder(Open | Challenge | Proof | Refuse)


class Handshake:
    """One side of it. The dialer sends what start() gives; then both feed() what they receive and
    send what comes back, until `done`."""

    def __init__(
        self,
        side: Side,
        purpose: Purpose,
        secret: str,
        card: bytes,
        check: Check,
        *,
        version: int = FORMAT_VERSION,
        is_local: bool = False,
    ) -> None:
        """`is_local`: as of Proof."""
        self._side = side
        self._purpose = purpose
        self.secret = secret
        self._card = card
        self._check = check
        self._version = version
        self._is_local = is_local
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._their_nonce = b""
        self._both = (b"", b"")
        """What dialer and listener said of themselves."""
        self.done = False
        self.peer_card = b""
        """Theirs, once done."""
        self.encrypts = True
        """Whether TLS follows, once done."""

    def start(self) -> bytes:
        return _encode(Open(self._version, self._purpose, self._nonce))

    def feed(self, frame: bytes) -> bytes:
        """What to send now, or nothing. Raises PeerError: send its reply, if any, and close."""
        try:
            message = _decoder.decode(frame)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise PeerError("the other side is not a Quire engine") from error
        match message:
            case Refuse(reason=reason):
                raise PeerError(f"the peer refused: {_printable(reason)}")
            case Open() if self._side is Side.LISTENER and not self._their_nonce:
                return self._challenge(message)
            case Challenge(nonce=nonce) if self._side is Side.DIALER and not self._their_nonce:
                self._their_nonce = _checked_nonce(nonce)
                mac = self._mac(Side.DIALER, self._said, b"")
                return _encode(Proof(mac, self._card, self._is_local))
            case Proof() if self._their_nonce and not self.done:
                return self._accept(message)
        raise PeerError("the other side does not keep to the protocol")

    def _challenge(self, message: Open) -> bytes:
        if message.version != self._version:
            raise _refusal(
                other_version(self._version, message.version),
                said=other_version(message.version, self._version),
            )
        if message.purpose is not self._purpose:
            reason = (
                f"this port is for {self._purpose.value}, not for {message.purpose.value}: "
                "give the address that the engine names as its peer address"
            )
            raise _refusal(reason)
        self._their_nonce = _checked_nonce(message.nonce)
        return _encode(Challenge(self._nonce))

    def _accept(self, proof: Proof) -> bytes:
        listening = self._side is Side.LISTENER
        said = _said(proof.card, proof.is_local)
        expected = (
            self._mac(Side.DIALER, said, b"")
            if listening
            else self._mac(Side.LISTENER, self._said, said)
        )
        if not hmac.compare_digest(expected, proof.mac):
            raise _refusal("the secrets differ: set the same peer_secret on both sides")
        try:
            objection = self._check(proof.card)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise PeerError("the other side does not keep to the protocol") from error
        if objection is not None:
            raise _refusal(*objection)
        self.done = True
        self.peer_card = proof.card
        self.encrypts = not (self._is_local and proof.is_local)
        self._both = (said, self._said) if listening else (self._said, said)
        if not listening:
            return b""
        mac = self._mac(Side.LISTENER, said, self._said)
        return _encode(Proof(mac, self._card, self._is_local))

    def seal(self, side: Side) -> bytes:
        """What a side says first under TLS, once done."""
        return self._mac(side, *self._both, sealing=True)

    @property
    def _said(self) -> bytes:
        return _said(self._card, self._is_local)

    def _mac(self, prover: Side, dialer: bytes, listener: bytes, *, sealing: bool = False) -> bytes:
        nonces = (self._nonce, self._their_nonce)
        mine_first = self._side is Side.DIALER
        mac = hmac.new(self.secret.encode(), digestmod=hashlib.sha256)
        for field in (
            b"seal" if sealing else b"proof",
            prover.value,
            str(self._version).encode(),
            self._purpose.value.encode(),
            *(nonces if mine_first else nonces[::-1]),
            dialer,
            listener,
        ):
            mac.update(len(field).to_bytes(4, "little"))
            mac.update(field)
        return mac.digest()


class PageCard(Identity, frozen=True, omit_defaults=True):
    """What a side of a connection for pages says of itself."""

    ways: list[str] = msgspec.field(default_factory=list)
    """By which it gives pages, or takes them, the best first; none: as pages always can."""


def page_handshake(
    side: Side,
    secret: str,
    identity: Identity,
    *,
    is_local: bool = False,
    ways: Sequence[str] = (),
) -> Handshake:
    """For connections that carry pages: the card is the identity, and the ways."""

    def check(card: bytes) -> Objection | None:
        return objection(identity, msgpack_decoder(Identity).decode(card))

    card = msgspec.msgpack.encode(PageCard(**msgspec.structs.asdict(identity), ways=list(ways)))
    return Handshake(
        side, Purpose.PAGES, secret, card, check, version=identity.version, is_local=is_local
    )


def chosen_way(dialer: Sequence[str], listener: Sequence[str]) -> str:
    """The best of the dialer's that the listener has; empty: none, so it is as always."""
    return next((way for way in dialer if way in listener), "")


def ways_of(card: bytes) -> list[str]:
    """Of a card that was checked. Raises PeerError."""
    try:
        return msgpack_decoder(PageCard).decode(card).ways
    except msgspec.DecodeError as error:
        raise PeerError("the other side does not keep to the protocol") from error


def _said(card: bytes, is_local: bool) -> bytes:
    """What a side says of itself."""
    return card + bytes([is_local])


def objection(ours: Identity, theirs: Identity) -> Objection | None:
    reason = why_not(ours, theirs)
    return Objection(reason, why_not(theirs, ours)) if reason else None


def _refusal(reason: str, said: str = "") -> PeerError:
    return PeerError(reason, reply=_encode(Refuse(said or reason)))


def _checked_nonce(nonce: bytes) -> bytes:
    if len(nonce) != _NONCE_BYTES:
        raise PeerError("the other side does not keep to the protocol")
    return nonce


def _printable(reason: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in reason[:_MAX_REASON_CHARS])
