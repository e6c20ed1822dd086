"""What a way is: how the bytes of granted pages get from a page server into a reader's own pages.

    reader                                      page server
      Read(grant, ticket, indices)        ──▶   enters the grant: its pages do not change
                                          ◀──   ReadAnswer(a status per page, what the way needs)
      Inlet.take: bytes into own pages    ⇄     Outlet.give: until the reader has them
                                                leaves the grant

Reading is one-sided where it can be: the page server says where pages are and waits for the
reader's word, or for its end. A way says nothing of who may read what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.peer.protocol import Read, ReadAnswer
from quire.peer.region import Region
from quire.peer.transport import Cancelled, Connection


@dataclass(frozen=True, slots=True)
class Granted:
    """What of a read may be given."""

    region: Region
    pages: list[int]
    """Of the region; those whose status is OK, in order."""
    statuses: bytes
    """Of all pages that were asked for."""
    page_bytes: int
    """With the heads that were asked for."""


class Outlet(Protocol):
    """A page server's end. Any number of connections use it at once."""

    def open(self, connection: Connection) -> None:
        """Hands have been shaken: tell what a reader must know. Raises what connections raise."""

    def give(self, connection: Connection, read: Read, granted: Granted) -> None:
        """Answer, and come back when the reader has the pages. Raises what connections raise: then
        the reader does not take them for good. The connection's deadline is the caller's to set."""

    def close(self) -> None:
        """Nobody reads any more, and the pages go away."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of an answer goes where."""

    region: Region
    """Ours."""
    pages: Sequence[int]
    """Of it, one for each page that was asked for."""
    first_head: int
    last_head: int
    """[first, last): those that were asked for."""
    page_bytes: int
    """With those heads."""
    timeout_s: float
    """Without a page for so long, it is given up."""
    cancelled: Cancelled


class Inlet(Protocol):
    """A reader's end of one connection."""

    @property
    def name(self) -> str:
        """Of the transport, as people know it."""

    @property
    def max_ahead(self) -> int:
        """Reads that may be under way at once."""

    def take(self, connection: Connection, answer: ReadAnswer, wanted: Wanted) -> bytes:
        """The statuses that hold once it returns. Raises what connections raise, ReadCancelled;
        PeerError for an answer that is not to what was asked."""
