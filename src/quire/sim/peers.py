"""SimPeers: the page servers of all engines, and what a reader of theirs gets to see.

    grant ──▶ OPEN ──revoke──▶ CLOSING (readers left) ──last reader leaves──▶ gone, on_free
                     └──revoke, no readers──▶ gone, on_free

Knows grants, readers and the pools behind them. A reader takes a page from all ranks of the
holder, whatever their number: shards are turned back into the page they are cut from, and all
ranks must agree on it. Does not know time: quire.sim.reads decides when a read happens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.messages import PeerSource
from quire.sim.bandwidth import SimLinks, SimPassage
from quire.sim.content import Pools, content_of
from quire.types import OperationId, Tier

_OnFree = Callable[[int, OperationId, str, int], None]
"""(rank, operation, component, pages)"""


class LineState(enum.Enum):
    """How two engines can reach each other."""

    UP = enum.auto()
    STALLED = enum.auto()
    """Nothing arrives, and nobody can tell yet."""
    CUT = enum.auto()


@dataclass(slots=True, eq=False)
class _Grant:
    rank: int
    op: OperationId
    component: str
    pages: list[int]
    num_readers: int = 0
    on_free: _OnFree | None = None
    """Set: CLOSING."""

    def gone(self) -> None:
        if self.on_free is not None and not self.num_readers:
            self.on_free(self.rank, self.op, self.component, len(self.pages))


class Serving:
    """The page servers of one engine, in one of its lives."""

    def __init__(self, pools: Pools, epoch: str, address: str) -> None:
        self.pools = pools
        self.epoch = epoch
        self.address = address
        self._open: dict[tuple[int, OperationId, str], _Grant] = {}

    def __len__(self) -> int:
        return len(self._open)

    def grant(self, rank: int, op: OperationId, component: str, pages: list[int]) -> None:
        self._open[rank, op, component] = _Grant(rank, op, component, pages)

    def revoke(self, rank: int, op: OperationId, on_free: _OnFree) -> None:
        """No more readers; on_free is called once, when the last has left."""
        for name in [n for n in self._open if n[0] == rank and n[1] == op]:
            grant = self._open.pop(name)
            grant.on_free = on_free
            grant.gone()

    def enter(self, op: OperationId, component: str) -> GrantReader | None:
        ranks = range(self.pools.num_ranks)
        grants = [self._open.get((rank, op, component)) for rank in ranks]
        found = [grant for grant in grants if grant is not None]
        if len(found) < len(grants):
            return None
        for grant in found:
            grant.num_readers += 1
        return GrantReader(self.pools, found)


@dataclass(slots=True)
class GrantReader:
    """One reader of one grant, on all ranks, until it leaves."""

    pools: Pools
    grants: list[_Grant]

    def contents(self, indices: Iterable[int]) -> list[int | None]:
        """What the pages contain at this moment; None: the ranks hold no shards of one page."""
        found: list[int | None] = []
        for index in indices:
            shards = {self._content(grant, index) for grant in self.grants}
            found.append(shards.pop() if len(shards) == 1 else None)
        return found

    def leave(self) -> None:
        for grant in self.grants:
            grant.num_readers -= 1
            grant.gone()

    def _content(self, grant: _Grant, index: int) -> int | None:
        rank, component = grant.rank, grant.component
        (number,) = self.pools.read(rank, Tier.HOST, [grant.pages[index]], component)
        return content_of(number, rank, component)


@dataclass(slots=True)
class SimPeers:
    """What one engine sees of the others' page servers."""

    address: str
    """Its own."""
    reach: Callable[[str, str], LineState]
    """How two addresses can reach each other now."""
    servers: dict[str, Serving] = field(default_factory=dict)
    """By epoch; shared among all engines. One that dies is taken out."""
    links: SimLinks | None = None
    """What the lines carry; None: everything at once."""

    def line(self, source: PeerSource) -> LineState:
        server = self.servers.get(source.epoch)
        return LineState.CUT if server is None else self.reach(self.address, server.address)

    def passage(self, source: PeerSource, num_pages: int) -> SimPassage:
        """So many pages set out from there, behind all that is on its way."""
        server = self.servers.get(source.epoch)
        if self.links is None or server is None:
            return SimPassage([])
        return self.links.enter(server.address, self.address, num_pages)

    def enter(self, source: PeerSource, component: str) -> GrantReader | None:
        server = self.servers.get(source.epoch)
        if server is None or self.reach(self.address, server.address) is LineState.CUT:
            return None
        return server.enter(OperationId(source.grant), component)
