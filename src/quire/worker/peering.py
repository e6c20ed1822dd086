"""Peering: a rank's exchange of pages with the ranks of other engines, and its two operations.

Knows the page server and the page client of this rank; what is served or fetched, and from whom,
comes in commands.

    Serve   granted at once; ends when it is cancelled and its last reader has gone
    Fetch   from a peer: in batches, like one from the store; but a page that fails does not stop
            those behind it, which may be asked for again by themselves
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from quire.memory.host import HostPool
from quire.messages import Fetch, PeerSource, Serve
from quire.peer.address import join_address
from quire.peer.client import PageClient
from quire.peer.kinds import TransportKind
from quire.peer.nixl import NixlAgent
from quire.peer.region import Region
from quire.peer.server import PageServer
from quire.peer.tickets import Tickets
from quire.types import PageStatus
from quire.worker.config import PeerServing
from quire.worker.tasks import UNKNOWN, PageTask, Reporter


class Peering:
    def __init__(
        self,
        config: PeerServing,
        pools: Mapping[str, HostPool],
        count_error: Callable[[Exception], None],
    ) -> None:
        """Raises ConfigError when it cannot listen where it should."""
        self.regions = {
            component: Region(pool, *config.heads[component]) for component, pool in pools.items()
        }
        is_nixl = config.transport is TransportKind.NIXL
        self._nixl = nixl = NixlAgent() if is_nixl else None
        self.server = PageServer(
            join_address("tcp", config.host, config.port),
            identity=config.identity,
            secret=config.secret,
            epoch=config.epoch,
            regions=self.regions.values(),
            tickets=Tickets(config.ticket_key),
            kind=config.transport,
            nixl=nixl,
        )
        self.client = PageClient(
            config.identity, config.secret, kind=config.transport, on_error=count_error, nixl=nixl
        )

    def counters(self) -> dict[str, int]:
        return {**self.server.counters(), **self.client.counters()}

    def close(self, timeout_s: float) -> bool:
        """After the last fetch has ended. False if a thread still reads from the pools."""
        self.client.close()
        is_quiet = self.server.close(timeout_s)
        if self._nixl is not None and is_quiet:
            self._nixl.close()
        return is_quiet


class ServeTask:
    """Pages that peers may read. Its one report is its last."""

    def __init__(self, command: Serve, server: PageServer, reporter: Reporter) -> None:
        """The command's pages have been checked."""
        self._command = command
        self._server = server
        self._reporter = reporter
        self._is_cancelled = False
        server.grant(command.op, command.component, command.host)

    def cancel(self) -> None:
        if self._is_cancelled:
            return
        self._is_cancelled = True
        command = self._command
        ended = partial(self._reporter.finish, command, PageStatus.OK)
        self._server.revoke(command.op, command.component, ended)

    def expire(self, now: float) -> None:
        """It has no deadline of its own."""


_REPORT_EVERY_S = 0.1
"""Of what has come of a batch that is still under way."""


class PeerTask(PageTask):
    """A fetch from a peer. What moves is not late, page by page; what waits for a thread is not
    either: its leader knows whether anything moves, and cancels it."""

    def __init__(
        self,
        command: Fetch,
        reporter: Reporter,
        source: PeerSource,
        *,
        region: Region,
        client: PageClient,
        batch_pages: int,
    ) -> None:
        """The command's pages have been checked."""
        super().__init__(command, reporter, batch_pages=batch_pages)
        self._source = source
        self._region = region
        self._client = client

    def _is_late(self, now: float) -> bool:
        return self._num_running > 0 and super()._is_late(now)

    def _next_piece(self) -> Callable[[], None] | None:
        self._deadline = self._clock() + self._timeout_s
        return super()._next_piece()

    def _stops_at(self, statuses: list[PageStatus]) -> PageStatus | None:
        return PageStatus.TIMEOUT if PageStatus.TIMEOUT in statuses else None

    def _move(self, first: int, end: int) -> list[PageStatus]:
        return self._client.read(
            self._source,
            self._region,
            self._pages[first:end].tolist(),
            offset=first,
            timeout_s=self._timeout_s,
            cancelled=lambda: self._stop is PageStatus.CANCELLED,
            came=lambda at, statuses: self._came(first + at, statuses),
        )

    def _came(self, first: int, statuses: bytes) -> None:
        """Pages from `first` on, in the middle of a batch: a peer that is slow is not silent."""
        with self._lock:
            now = self._clock()
            self._deadline = now + self._timeout_s
            self._statuses[first : first + len(statuses)] = statuses
            unknown = self._statuses.find(UNKNOWN, self._first)
            is_due = now - (self._reported_at or 0.0) >= _REPORT_EVERY_S
            if is_due and unknown > self._first and not self._is_over and self._stop is None:
                self._send(unknown, final=False)
