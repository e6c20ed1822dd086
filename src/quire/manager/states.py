"""States: what leases hold beside full pages: windows, working states, snapshots.

*Window.* The table of window pages covers what the request's next tokens may see, and its private
end, chunk by chunk: a long prompt never needs more than a window and a chunk. Committed pages
become the tree's with their nodes; those that have left the window are dropped from the table.

*Recurrent state.* A request works on a slot of its own, so no two ever see each other, and a
snapshot in the tree is never written. Where it passes a page boundary the engine may save the
working state into another slot of the request's, the *saved* one. That becomes a snapshot in the
tree at checkpoints: at the end of the prompt, where an earlier request had branched off, every N
pages if asked for; and, wherever the request was then, at its end. A path keeps only so many.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.components import Component, Recurrent, SlidingWindow, recurrent_of, window_of
from quire.keys import PrefixKey
from quire.manager.core import Core
from quire.tree import Node, Tenant, held_pages, slot_of
from quire.types import (
    DEVICE,
    NO_PAGES,
    NO_SLOT,
    PAGE_ID_BYTES,
    READY,
    PageIds,
    num_pages,
    page_array,
    page_ids,
)


@dataclass(slots=True)
class WindowTable:
    """Window pages of a lease: those of pages [first, first + n), the tree's before private."""

    first: int = 0
    tree_pages: PageIds = NO_PAGES
    private_pages: PageIds = NO_PAGES

    @property
    def pages(self) -> PageIds:
        return PageIds(self.tree_pages + self.private_pages)

    @property
    def end(self) -> int:
        return self.first + num_pages(self.tree_pages) + num_pages(self.private_pages)


@dataclass(slots=True)
class WorkingState:
    """Recurrent state of a lease: slots of the device pool."""

    slot: int = NO_SLOT
    """Its own, read and written by every batch."""
    restore: int = NO_SLOT
    """The tree's snapshot to begin from; none: begin from nothing, or go on."""
    saved_slot: int = NO_SLOT
    saved_at: int = 0
    """Page boundary whose state `saved_slot` holds; 0: it holds nothing."""

    def own_slots(self) -> PageIds:
        return page_ids([slot for slot in (self.slot, self.saved_slot) if slot != NO_SLOT])


@dataclass(slots=True)
class LeaseState:
    num_prompt: int
    """Pages of the prompt: a checkpoint."""
    branches: set[int]
    """Page boundaries up to which others share it, though nothing there can be used: others."""
    window: WindowTable | None = None
    recurrent: WorkingState | None = None
    marks: list[Node] = field(default_factory=list)
    """Where branches were marked and the state is not yet taken care of."""

    def private_pages(self, component: Component) -> PageIds:
        """Device pages that belong to the lease alone, for check_invariants()."""
        if isinstance(component, SlidingWindow) and self.window is not None:
            return self.window.private_pages
        if isinstance(component, Recurrent) and self.recurrent is not None:
            return self.recurrent.own_slots()
        return NO_PAGES


class States:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._window = window_of(core.components)
        self._recurrent = recurrent_of(core.components)
        self._window_slot = slot_of(self._window.index, DEVICE) if self._window else -1
        self._state_slot = slot_of(self._recurrent.index, DEVICE) if self._recurrent else -1

    def new(self, *, branch: int, num_prompt: int) -> LeaseState:
        """For a lease that found `branch` pages in the tree, usable or not."""
        return LeaseState(
            num_prompt,
            {branch} if branch else set(),
            WindowTable() if self._window is not None else None,
            WorkingState() if self._recurrent is not None else None,
        )

    def enter(self, state: LeaseState, device_tail: Node) -> None:
        """The lease's device part ends here now: take what the tree has."""
        if self._window is not None and state.window is not None:
            nodes = self._window.needed(device_tail)[::-1]
            pages = b"".join(held_pages(node, self._window_slot) for node in nodes)
            first = max(0, device_tail.end - self._window.num_pages)
            surplus = (first - nodes[0].start) * PAGE_ID_BYTES if nodes else 0
            state.window = WindowTable(first, PageIds(pages[surplus:]))
        if state.recurrent is not None:
            restore = NO_SLOT
            if device_tail.parent is not None:
                restore = int(page_array(held_pages(device_tail, self._state_slot))[0])
            state.recurrent.restore = restore

    # ---- computing ------------------------------------------------------------------------------

    def begin(self, state: LeaseState, tenant: Tenant | None) -> bool:
        """Give the request its own working state. False: no slot is left, nothing was changed."""
        recurrent = state.recurrent
        if recurrent is None or recurrent.slot != NO_SLOT:
            return True
        recurrent.slot = self._take_slot(tenant)
        if recurrent.slot == NO_SLOT:
            self._core.counters.device_allocation_failures += 1
        return recurrent.slot != NO_SLOT

    def cover(self, state: LeaseState, last: int, tenant: Tenant | None) -> bool:
        """Have window pages for everything before page `last`. False: nothing was changed."""
        window = state.window
        if window is None or window.end >= last:
            return True
        pages = self._core.reserve(self._window_slot, last - window.end, tenant)
        if pages is None:
            self._core.counters.device_allocation_failures += 1
            return False
        window.private_pages = PageIds(window.private_pages + pages)
        return True

    def next_stop(self, state: LeaseState, first: int, last: int) -> int:
        """First checkpoint in (first, last]: where a chunk should end. `last` if there is none."""
        if state.recurrent is None or not self._core.config.snapshots.per_path:
            return last
        every = self._core.config.snapshots.every_pages
        stops = [state.num_prompt, *state.branches]
        if every:
            stops.append((first // every + 1) * every)
        return min((stop for stop in stops if first < stop <= last), default=last)

    def save_slot(self, state: LeaseState, tenant: Tenant | None) -> int:
        """Where to save the working state; NO_SLOT: nowhere."""
        recurrent = state.recurrent
        if recurrent is None or not self._core.config.snapshots.per_path:
            return NO_SLOT
        if recurrent.saved_slot == NO_SLOT:
            recurrent.saved_slot = self._take_slot(tenant)
            if recurrent.saved_slot == NO_SLOT:
                self._core.counters.snapshots_skipped += 1
        recurrent.saved_at = 0
        return recurrent.saved_slot

    def _take_slot(self, tenant: Tenant | None) -> int:
        pages = self._core.reserve(self._state_slot, 1, tenant)
        return NO_SLOT if pages is None else int(page_array(pages)[0])

    # ---- sharing --------------------------------------------------------------------------------

    def shareable(self, state: LeaseState, at: Node, key: PrefixKey, last: int) -> int:
        """Up to which page a commit below `at` may go: window pages that are on their way, or on
        their way out, can neither be shared nor replaced."""
        if state.window is None:
            return last
        last = min(last, state.window.end)
        for node in self._core.tree.walk(key, at).nodes:
            holding = node.held[self._window_slot]
            if holding is not None and holding.state is not READY:
                return min(last, node.start)
        return last

    def share(self, state: LeaseState, stop: Node, tail: Node) -> None:
        """The lease's full pages below `stop`, down to `tail`, are the tree's now: so are the
        window pages beside them."""
        for page in sorted(state.branches):
            if stop.end < page <= tail.end:
                node = self._core.tree.node_at(tail, page)
                node.is_mark = True
                state.marks.append(node)
        if state.window is not None and self._window is not None:
            self._share_windows(state.window, stop, tail, self._window.num_pages)
            assert self._core.upkeep is not None
            self._core.upkeep.cut_at_window(tail)

    def saved(self, state: LeaseState, page: int) -> None:
        """The saved slot holds the state after page boundary `page`."""
        if state.recurrent is not None:
            state.recurrent.saved_at = page

    def checkpoint(self, state: LeaseState, device_tail: Node) -> list[tuple[int, Node]]:
        """Share the saved state if it was taken at a checkpoint. Returns what is worth a copy on
        the host now, by component: that state, and the window at each new point."""
        due: list[tuple[int, Node]] = []
        recurrent, node = state.recurrent, None
        at = recurrent.saved_at if recurrent is not None else 0
        if recurrent is not None and at and self.next_stop(state, at - 1, at + 1) == at:
            node = self._publish(recurrent, device_tail)
            if node is not None and self._recurrent is not None:
                due.append((self._recurrent.index, node))
        points, state.marks = state.marks, []
        if node is not None:
            points.append(node)
        if self._window is not None:
            due += [(self._window.index, at) for point in points for at in self._window.kept(point)]
        return due

    def _share_windows(self, window: WindowTable, stop: Node, tail: Node, size: int) -> None:
        core, slot = self._core, self._window_slot
        taken, duplicate = [window.tree_pages], []
        private = window.private_pages
        for node in reversed(list(core.tree.path(tail, stop))):
            cut = node.num_pages * PAGE_ID_BYTES
            mine, private = PageIds(private[:cut]), PageIds(private[cut:])
            holding = node.held[slot]
            if holding is None:
                core.tree.attach(node, slot, mine, READY)
                core.announce_stored(node, slot)
                taken.append(mine)
            else:
                duplicate.append(mine)
                taken.append(holding.pages)
        core.allocators[slot].free(PageIds(b"".join(duplicate)))
        window.private_pages = private
        first = max(window.first, tail.end - size)
        pages = b"".join(taken)
        window.tree_pages = PageIds(pages[(first - window.first) * PAGE_ID_BYTES :])
        window.first = first

    def _publish(self, recurrent: WorkingState, tail: Node) -> Node | None:
        """Hang the saved state into the tree, on the path to `tail`; returns where."""
        core, slot = self._core, self._state_slot
        if tail.end < recurrent.saved_at:
            return None  # its full pages are not shared (yet)
        node = self._core.tree.node_at(tail, recurrent.saved_at)
        if node.held[slot] is not None:
            return None  # somebody was first; the slot is used again
        core.tree.attach(node, slot, page_ids([recurrent.saved_slot]), READY)
        core.announce_stored(node, slot)
        core.counters.snapshots += 1
        recurrent.saved_slot, recurrent.saved_at = NO_SLOT, 0
        self._keep_within_budget(node)
        return node

    def _keep_within_budget(self, newest: Node) -> None:
        """Of the snapshots on a path only so many stay: forks and the newest before others, and
        of those the ones that save the most computing."""
        assert self._recurrent is not None
        core, index = self._core, self._recurrent.index
        device, host = self._state_slot, self._state_slot + 1
        nodes = [n for n in core.tree.path(newest) if n.held[device] or n.held[host]]
        while len(nodes) > core.config.snapshots.per_path:
            gaps = [
                (len(node.children or ()) > 1, node.end - (above.end if above else 0), node)
                for node, above in zip(nodes[1:], [*nodes[2:], None], strict=True)
            ]
            victim = min(gaps, key=lambda gap: gap[:2])[2]
            core.drop(victim, index)
            core.tidy((victim,))
            core.counters.snapshots_over_budget += 1
            nodes.remove(victim)

    # ---- ending ---------------------------------------------------------------------------------

    def release(self, state: LeaseState, device_tail: Node) -> None:
        """The lease ends: leave its last saved state where it belongs, give the rest back."""
        core = self._core
        if state.window is not None:
            core.allocators[self._window_slot].free(state.window.private_pages)
            state.window.private_pages = NO_PAGES
        recurrent = state.recurrent
        if recurrent is not None:
            if recurrent.saved_at:
                self._publish(recurrent, device_tail)
            core.allocators[self._state_slot].free(recurrent.own_slots())
            recurrent.slot = recurrent.saved_slot = NO_SLOT

    def at_rest(self, tail: Node) -> list[tuple[int, Node]]:
        """What is worth a copy on the host now that a request has come to rest at `tail`, by
        component: the window there, and every snapshot on the way."""
        due: list[tuple[int, Node]] = []
        if self._window is not None:
            due += [(self._window.index, node) for node in self._window.kept(tail)]
        if self._recurrent is not None:
            path = self._core.tree.path(tail)
            due += [(self._recurrent.index, node) for node in path if node.held[self._state_slot]]
        return due
