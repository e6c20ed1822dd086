"""What goes wrong between two engines: one sentence each, for the person who connected them."""

from __future__ import annotations

from quire.errors import QuireError


class PeerError(QuireError):
    """A peer cannot be reached, is not what it should be, or does not keep to the protocol."""

    def __init__(self, reason: str, *, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.reply = reply
        """A frame to send before closing, so that the other side knows why; empty: just close."""


class ReadCancelled(PeerError):
    """Whoever waited for these bytes does not want them any more."""
