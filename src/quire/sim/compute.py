"""Compute: what a model does to the pages of a lease, in every component, in fake bytes.

Knows which pages a lease was given, what becomes of them when a chunk is computed, and how to
compare them with what they must hold. Does not know when a request computes, or why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.manager import CacheManager, Lease, LoadState
from quire.manager.states import WindowTable, WorkingState
from quire.sim.content import Pools
from quire.sim.report import SimulationError, Tally
from quire.sim.workers import SimWorkers
from quire.types import NO_SLOT, PAGE_ID_BYTES, PageIds, Tier, page_array, page_ids

FULL, WINDOW, RECURRENT = "full", "window", "recurrent"


@dataclass(slots=True)
class Compute:
    manager: CacheManager
    pools: Pools
    workers: SimWorkers
    window_pages: int
    """Pages that a window really spans, whatever the cache believes."""
    tally: Tally = field(default_factory=Tally)

    # ---- room: what is given holds garbage ------------------------------------------------------

    def begin(self, lease: Lease) -> bool:
        """A working state of its own. False: no slot is left."""
        recurrent = lease.state and lease.state.recurrent
        if not recurrent or recurrent.slot != NO_SLOT:
            return True
        if not self.manager.begin(lease):
            return False
        self.pools.scribble_everywhere([recurrent.slot], RECURRENT)
        return True

    def extend(self, lease: Lease, count: int) -> bool:
        """`count` more full pages. False: nothing was changed."""
        before = len(lease.private_pages)
        if not self.manager.extend(lease, count):
            return False
        new = PageIds(lease.private_pages[before:])
        self.pools.scribble_everywhere(page_array(new).tolist())
        return True

    def cover(self, lease: Lease, last: int) -> bool:
        """Window pages for everything before page `last`. False: nothing was changed."""
        window = lease.state and lease.state.window
        if not window:
            return True
        before = len(window.private_pages)
        if not self.manager.cover(lease, last):
            return False
        new = PageIds(window.private_pages[before:])
        self.pools.scribble_everywhere(page_array(new).tolist(), WINDOW)
        return True

    # ---- computing ------------------------------------------------------------------------------

    def run(
        self, lease: Lease, expected: Sequence[int], first: int, last: int, *, save: bool
    ) -> None:
        """Fill pages [first, last) of every table, and bring the working state to `last`; `save`:
        and save it, if there is a slot."""
        chunk = expected[first:last]
        if not chunk:
            return
        self.pools.compute(page_array(lease.pages)[first:last].tolist(), chunk)
        if lease.state is None:
            return
        window, recurrent = lease.state.window, lease.state.recurrent
        if window is not None:
            if lease.load_state is LoadState.IDLE:  # else what it reads is still on its way
                self._check_window(str(lease.owner), window, expected[:first])
            mine = page_array(window.pages)[first - window.first : last - window.first]
            self.pools.compute(mine.tolist(), chunk, WINDOW)
        if recurrent is None:
            return
        if recurrent.restore != NO_SLOT:
            self.pools.copy(recurrent.restore, recurrent.slot, RECURRENT)
            recurrent.restore = NO_SLOT
        if first > 0:
            self._check_state(str(lease.owner), recurrent.slot, expected[first - 1], "goes on from")
        self.pools.compute([recurrent.slot], chunk[-1:], RECURRENT)
        if save and (slot := self.manager.save_slot(lease)) != NO_SLOT:
            self.pools.copy(recurrent.slot, slot, RECURRENT)
            self.manager.saved(lease, last)

    # ---- checking -------------------------------------------------------------------------------

    def check(self, lease: Lease, expected: Sequence[int], count: int, who: str = "") -> None:
        """Its tables, and its state, hold exactly what they must after `count` pages."""
        who = who or str(lease.owner)
        self._check(f"{who} uses a wrong page", lease.pages, expected[:count])
        if lease.state is None:
            return
        window, recurrent = lease.state.window, lease.state.recurrent
        if window is not None:
            self._check_window(who, window, expected[:count])
        if recurrent is not None and count > 0:
            self._check_working(who, recurrent, expected[count - 1])

    def _check_window(self, who: str, window: WindowTable, expected: Sequence[int]) -> None:
        """All of its table; and that has all pages that the next token sees."""
        count = len(expected)
        if window.first > max(0, count - self.window_pages) or window.end < count:
            has = f"it has {window.first}..{window.end} at page {count}"
            raise SimulationError(f"{who} lacks pages of its window: {has}")
        seen = expected[window.first :]
        self._check(f"{who} uses a wrong page of its window", window.pages, seen, WINDOW)

    def _check_working(self, who: str, recurrent: WorkingState, content: int) -> None:
        if recurrent.restore != NO_SLOT:
            self._check_state(who, recurrent.restore, content, "is to begin from")
        elif recurrent.slot != NO_SLOT:
            self._check_state(who, recurrent.slot, content, "has come to")

    def _check_state(self, who: str, slot: int, content: int, what: str) -> None:
        wrong = f"{who} uses a wrong page: the state it {what}"
        self._check(wrong, page_ids([slot]), [content], RECURRENT)

    def _check(
        self, wrong: str, pages: PageIds, contents: Sequence[int], component: str = FULL
    ) -> None:
        ranks = self.workers.alive
        pages = PageIds(pages[: len(contents) * PAGE_ID_BYTES])
        at = self.pools.first_wrong(Tier.DEVICE, pages, contents, ranks, component)
        self.tally.checked_pages += len(contents) * len(ranks)
        if at is not None:
            rank, index = at
            raise SimulationError(f"{wrong}: {index} of {len(contents)} on rank {rank}")
