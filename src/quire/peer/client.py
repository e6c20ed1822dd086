"""PageClient: fetches pages that a peer has granted straight into our own host pages.

Knows how a fetch is cut up: by the peer's ranks whose heads we need, then into pieces that several
connections fetch at the same time, on one machine through its memory (ways/). Pages are checked as
they come in.

When read() returns, however it went, nothing writes into the pages any more.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire.messages import PeerPart, PeerSource
from quire.peer import protocol
from quire.peer.connection_pool import ConnectionPool, PageLine, PoolLimits
from quire.peer.errors import PeerError, ReadCancelled
from quire.peer.identity import Identity
from quire.peer.kinds import TransportKind
from quire.peer.nixl import NixlAgent
from quire.peer.protocol import Read, ReadAnswer
from quire.peer.region import Region
from quire.peer.transport import Cancelled, Connection
from quire.peer.unix import near_address
from quire.peer.ways.base import Wanted
from quire.types import PageStatus


@dataclass(frozen=True, slots=True)
class ClientLimits:
    streams: int = 2
    """Connections that share one read from one page server."""
    max_helpers: int = 8
    """Threads for them, over all reads, beside those that call read()."""
    min_piece_bytes: int = 1 << 20
    piece_bytes: int = 4 << 20
    """Asked for at a time: between these, so that all streams have something to do."""
    ahead: int = 2
    """Pieces asked for on a connection before the first of them has come."""


@dataclass(slots=True)
class _Piece:
    """Pages [first, first + count) of a read, as far as one page server has them."""

    first: int
    count: int
    statuses: bytes = b""
    """Empty: not done."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one page server gives to a read."""

    part: PeerPart
    """With the heads that are asked of it."""
    pieces: list[_Piece]
    waiting: deque[_Piece]
    errors: deque[Exception]
    """Those that ended a stream."""

    def take(self) -> _Piece | None:
        try:
            return self.waiting.popleft()
        except IndexError:
            return None

    def status_of_rest(self) -> PageStatus:
        """Of pieces that no stream has finished."""
        match self.errors[-1] if self.errors else None:
            case ReadCancelled():
                return PageStatus.CANCELLED
            case TimeoutError():
                return PageStatus.TIMEOUT
            case _:
                return PageStatus.FAILED


@dataclass(frozen=True, slots=True)
class _Order:
    """One call of read()."""

    source: PeerSource
    region: Region
    pages: Sequence[int]
    start: int
    """Index within the grant of the first page."""
    deadline: float
    """For the first bytes."""
    timeout_s: float
    """Without a page for so long, it is given up."""
    cancelled: Cancelled
    came: Callable[[int, bytes], None]


class PageClient:
    """Any number of threads may read() at once."""

    def __init__(
        self,
        identity: Identity,
        secret: str,
        *,
        kind: TransportKind = TransportKind.AUTO,
        limits: ClientLimits | None = None,
        pool_limits: PoolLimits | None = None,
        on_error: Callable[[Exception], None] = lambda error: None,
        nixl: NixlAgent | None = None,
    ) -> None:
        """`on_error` hears, from any thread, why pages failed. `nixl`: for that kind."""
        self._secret = secret
        self._kind = kind
        self._limits = limits or ClientLimits()
        self._pool = ConnectionPool(identity, secret, pool_limits, nixl)
        self._on_error = on_error
        self._helpers = ThreadPoolExecutor(
            self._limits.max_helpers, thread_name_prefix="quire-peer-read"
        )
        self._lock = threading.Lock()
        self._received_pages = 0
        self._received_bytes: Counter[str] = Counter()
        """By transport."""
        self._closing = False

    def counters(self) -> dict[str, int]:
        with self._lock:
            return {
                "peer_received_pages": self._received_pages,
                "peer_received_bytes": self._received_bytes.total(),
                **{f"peer_received_bytes_{name}": n for name, n in self._received_bytes.items()},
            }

    def read(
        self,
        source: PeerSource,
        region: Region,
        pages: Sequence[int],
        *,
        offset: int = 0,
        timeout_s: float,
        cancelled: Cancelled = lambda: False,
        came: Callable[[int, bytes], None] = lambda _first, _statuses: None,
    ) -> list[PageStatus]:
        """Pages source.first + offset + i of the grant into pages[i] of the region's pool. Never
        raises for what a peer does. `timeout_s`: without a page. `came` hears, from any thread, of
        pages that are here while others are not, if one rank of the peer has all of them."""
        if self._closing:
            return [PageStatus.CANCELLED] * len(pages)
        order = _Order(
            source,
            region,
            pages,
            source.first + offset,
            time.monotonic() + timeout_s,
            timeout_s,
            lambda: self._closing or cancelled(),
            came,
        )
        parts = covering(source.parts, region.first_head, region.last_head)
        if parts is None:
            self._on_error(PeerError("the peer's ranks do not have all the heads that ours needs"))
            return [PageStatus.FAILED] * len(pages)
        if len(parts) > 1:  # a page has come when all its parts have
            order = replace(order, came=lambda _first, _statuses: None)
        shares = [self._share(order, part) for part in parts]
        self._fetch_all(order, shares)
        return self._result(order, shares)

    def interrupt(self) -> None:
        """Reads under way end soon, as cancelled."""
        self._closing = True

    def close(self) -> None:
        """No read may be under way, or begun from here on, without ending as cancelled."""
        self.interrupt()
        self._helpers.shutdown(wait=True)
        self._pool.close()

    # ---- cutting up -----------------------------------------------------------------------------

    def _share(self, order: _Order, part: PeerPart) -> _Share:
        page_bytes = order.region.cut_bytes(part.first_head, part.last_head)
        total = len(order.pages)
        # Every stream should have something to do, as long as it is worth a connection.
        piece_bytes = total * page_bytes // self._limits.streams
        piece_bytes = min(max(piece_bytes, self._limits.min_piece_bytes), self._limits.piece_bytes)
        step = min(max(1, piece_bytes // page_bytes), protocol.MAX_PAGES_PER_READ)
        pieces = [_Piece(first, min(step, total - first)) for first in range(0, total, step)]
        return _Share(part, pieces, deque(pieces), deque())

    def _fetch_all(self, order: _Order, shares: list[_Share]) -> None:
        """Until nothing is waiting, and every thread that took something is done with it."""
        helpers: list[Future[None]] = []
        try:
            for number, share in enumerate(shares):
                # This thread is a stream itself, of one share after the other.
                wanted = min(self._limits.streams, len(share.pieces)) - (number == 0)
                helpers += [self._helpers.submit(self._stream, order, share) for _ in range(wanted)]
            for share in shares:
                self._stream(order, share)
        finally:
            for helper in helpers:
                # What has not begun would find nothing waiting.
                if not helper.cancel() and (error := helper.exception()) is not None:
                    self._on_error(RuntimeError(f"{type(error).__name__}: {error}"))

    # ---- one stream -----------------------------------------------------------------------------

    def _stream(self, order: _Order, share: _Share) -> None:
        """Fetch pieces over one connection until none is waiting. When it fails, other streams of
        the share go on: trying again is left to whoever wants these pages."""
        if not share.waiting:
            return
        try:
            line = self._take_line(order, share.part)
        except (PeerError, EOFError, OSError) as error:
            self._failed(share, error)
            return
        try:
            line.connection.set_deadline(order.deadline, order.cancelled)
            self._converse(line, order, share)
        except (PeerError, EOFError, OSError, msgspec.DecodeError, ValueError) as error:
            self._pool.drop(line)
            self._failed(share, error)
        except BaseException:
            self._pool.drop(line)
            raise
        else:
            self._pool.give_back(line)

    def _take_line(self, order: _Order, part: PeerPart) -> PageLine:
        """On one machine the near way, if there is one. Raises PeerError, EOFError, OSError."""
        if self._kind.shares_memory:
            try:
                near = near_address(self._secret, order.source.epoch, part.address)
                return self._pool.take(near, order.deadline, order.cancelled)
            except ReadCancelled:
                raise
            except (PeerError, ConfigError, EOFError, OSError) as error:
                if self._kind is TransportKind.SHM:
                    raise PeerError(
                        f"{part.address} does not share its memory with us ({error}): is it on "
                        "this machine, and its peer_transport not tcp?"
                    ) from error
        return self._pool.take(part.address, order.deadline, order.cancelled)

    def _converse(self, line: PageLine, order: _Order, share: _Share) -> None:
        ahead = min(self._limits.ahead, line.inlet.max_ahead)
        asked: deque[_Piece] = deque()
        while True:
            while len(asked) < ahead and (piece := share.take()) is not None:
                asked.append(piece)
                self._ask(line.connection, order, share.part, piece)
            if not asked:
                return
            self._receive(line, order, share.part, asked.popleft())

    def _failed(self, share: _Share, error: Exception) -> None:
        share.errors.append(error)
        if not isinstance(error, ReadCancelled):
            self._on_error(error)

    def _ask(self, connection: Connection, order: _Order, part: PeerPart, piece: _Piece) -> None:
        read = Read(
            epoch=order.source.epoch,
            grant=order.source.grant,
            component=order.region.component,
            start=order.start + piece.first,
            count=piece.count,
            first_head=part.first_head,
            last_head=part.last_head,
            wait_s=order.deadline - time.monotonic(),
            ticket=order.source.ticket,
        )
        connection.send_frame(protocol.encode(read))

    def _receive(self, line: PageLine, order: _Order, part: PeerPart, piece: _Piece) -> None:
        answer = protocol.decode_answer(line.connection.recv_frame(protocol.MAX_FRAME_BYTES))
        region = order.region
        page_bytes = region.cut_bytes(part.first_head, part.last_head)
        _check(answer, piece, page_bytes)
        wanted = Wanted(
            region,
            order.pages[piece.first : piece.first + piece.count],
            part.first_head,
            part.last_head,
            page_bytes,
            order.timeout_s,
            order.cancelled,
        )
        piece.statuses = line.inlet.take(line.connection, answer, wanted)
        num_bytes = answer.statuses.count(PageStatus.OK) * page_bytes
        with self._lock:
            self._received_bytes[line.inlet.name] += num_bytes
        order.came(piece.first, piece.statuses)

    def _result(self, order: _Order, shares: list[_Share]) -> list[PageStatus]:
        """A page is as good as the worst of its parts."""
        statuses = np.zeros(len(order.pages), dtype=np.uint8)
        for share in shares:
            rest = bytes([share.status_of_rest()])
            for piece in share.pieces:
                part = statuses[piece.first : piece.first + piece.count]
                found = piece.statuses or rest * piece.count
                np.maximum(part, np.frombuffer(found, dtype=np.uint8), out=part)
        with self._lock:
            self._received_pages += int((statuses == PageStatus.OK).sum())
        return [PageStatus(status) for status in statuses.tolist()]


def covering(parts: Sequence[PeerPart], first_head: int, last_head: int) -> list[PeerPart] | None:
    """Which parts to ask for which heads, so that all of [first, last) come once; None if they
    are not all there."""
    shares = []
    head = first_head
    for part in sorted(parts, key=lambda part: part.first_head):
        end = min(part.last_head, last_head)
        if part.first_head <= head < end:
            shares.append(PeerPart(part.address, head, end))
            head = end
    return shares if head == last_head else None


def _check(answer: ReadAnswer, piece: _Piece, page_bytes: int) -> None:
    """Raises PeerError. Lengths are ours to know: an answer can only agree."""
    num_ok = answer.statuses.count(PageStatus.OK)
    if (
        len(answer.statuses) != piece.count
        or max(answer.statuses) > max(PageStatus)
        or (num_ok and answer.page_bytes != page_bytes)
    ):
        raise PeerError(protocol.NOT_TO_WHAT_WAS_ASKED)
