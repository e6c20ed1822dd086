"""Writer: keeps computed pages alive, once per step, whatever the component.

Knows the backups and writes of every component, what the host owes to whom, and which paths were
used; each runs over everything that became due, in one operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain

from quire.components import Component
from quire.config import WritePolicy
from quire.manager.core import Core
from quire.manager.writes.backups import Backups, Forgiven
from quire.manager.writes.kept import Kept
from quire.manager.writes.writes import Writes
from quire.messages import Touch
from quire.tree import NUM_TIERS, Node
from quire.types import HOST, PAGE_KEY_BYTES, num_pages

TOUCH_EVERY_S = 5.0
TOUCHED_PAGES = 1 << 13
"""Pages, and a path more, of which the store is told at a time that they were used."""


class Writer:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._forgiven: Forgiven = {}
        self._owing = core.tree.stays.owing
        self._has_host = core.config.host_pages > 0
        config = core.config.write
        self._copies = config.enabled
        self._selective = config.enabled and config.policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._moved = 0
        """Pages committed and evicted up to the last look at the cold ends."""
        self._backups: list[Backups] = []
        """By component, as the writes."""
        self._writes: list[Writes] = []
        for component in core.components:
            self._add(component)
        full = self._backups[0]
        self.committed, self.expect = full.committed, full.expect
        """Told of full pages that were computed and are on the device now, for others to use; and
        of those that will be."""
        self._touched: dict[Node, None] = {}
        """Ends of paths that were used and that the store may have, oldest use first."""
        self._next_touch_s = 0.0
        max_pages = sum(each.max_pages for each in core.tree.standing.retained[:NUM_TIERS])
        self._kept = Kept(core.tree, max_pages)

    def _add(self, component: Component) -> None:
        def backed_up(node: Node) -> None:
            if node.stored_in(component.index) != self._core.store_epoch:
                writes.want(node)

        backups = Backups(self._core, component, self._forgiven, backed_up)
        writes = Writes(self._core, component, partial(backups.want, urgent=True))
        self._backups.append(backups)
        self._writes.append(writes)

    def settled(self, due: Iterable[tuple[int, Node]]) -> None:
        """State of other components, by their index, that is there to stay."""
        for component, node in due:
            self._backups[component].committed(node)

    def used(self, tail: Node) -> None:
        """A request has hit a path."""
        if self._core.store_epoch:
            self._touched.pop(tail, None)
            self._touched[tail] = None
            if len(self._touched) > TOUCHED_PAGES:
                self._touched.pop(next(iter(self._touched)))
            for writes in self._writes:
                writes.used(tail)
        if self._selective:
            for backups in self._backups:
                backups.used(tail)

    def keep(self, tail: Node, until_s: float) -> None:
        """The store is to have this path until then, as far as that is in our hands."""
        if self._core.store_epoch:
            self._kept.ask(tail, until_s)

    def demand(self, component: int, node: Node) -> None:
        """A peer is to read it: it is copied to the host whatever the policy, evicting if need
        be. Asked for again until it is there."""
        self._backups[component].want(node, urgent=True)

    def flush(self, now: float) -> None:
        """Start what is due. Called at the end of each step."""
        core = self._core
        if not self._has_host or core.operations.lost_ranks:
            self._clear()
            return
        if self._owing or self._forgiven:
            self._settle_debts()
        if core.refused:
            core.refused.clear()
        counters = core.counters
        moved = counters.evicted_device_pages + counters.committed_pages
        has_moved, self._moved = moved != self._moved, moved
        for backups in self._backups:
            if self._copies and (has_moved or backups.expected):  # else its cold end is as it was
                backups.clean_ahead()
            if backups.due:
                backups.start()
        for writes in self._writes:
            if writes.due or writes.retries:
                writes.flush(now)
        if now >= self._next_touch_s and (self._touched or self._kept.until):
            self._touch(now)

    def _clear(self) -> None:
        """Nothing can be copied any more."""
        stays = self._core.tree.stays
        for node, slot in list(stays.owing):
            stays.forgive(node, slot)
        for backups in self._backups:
            backups.take_due()
        for writes in self._writes:
            writes.clear()
        self._kept.clear()

    def _settle_debts(self) -> None:
        """Have copied what the host lacks and needs; what it has no room for may go without, until
        there is room for it that is nobody else's."""
        stays = self._core.tree.stays
        for node, slot in list(self._forgiven):
            held = node.held[slot]
            if held is None or not held.forgiven:
                del self._forgiven[node, slot]
            elif self._core.allocators[slot + HOST].num_free >= num_pages(held.pages):
                del self._forgiven[node, slot]
                stays.claim(node, slot)
        for node, slot in self._owing:
            self._backups[slot // NUM_TIERS].owed(node)
        for node, slot in self._forgiven:
            stays.forgive(node, slot)

    @property
    def has_work(self) -> bool:
        return any(b.due for b in self._backups) or any(w.due for w in self._writes)

    @property
    def num_waiting(self) -> int:
        return sum(writes.num_waiting for writes in self._writes)

    def next_due(self) -> float | None:
        first = self._next_touch_s if self._kept.until else None
        for writes in self._writes:
            if writes.retries and (first is None or writes.retries[0][0] < first):
                first = writes.retries[0][0]
        return first

    def _touch(self, now: float) -> None:
        """Tell the store which paths were used here: what is hot in memory must not grow cold
        there."""
        core, used, room = self._core, self._touched, TOUCHED_PAGES
        self._touched, self._next_touch_s = {}, now + TOUCH_EVERY_S
        kept = self._kept.tails(now)
        if not core.store_epoch:
            return
        seen: set[Node] = set()
        here = (tail for tail in reversed(used) if any(tail.held))  # the others are gone
        for tail in chain(kept, here):
            if tail in seen:
                continue  # a longer path passes it
            path = list(core.tree.path(tail))
            seen.update(path)
            room -= self._touch_path(path)
            if room < 0:
                break

    def _touch_path(self, path: list[Node]) -> int:
        """The lower end first. How many full pages of it the store has."""
        core, keys = self._core, b""
        for node in reversed(path):
            if node.stored != core.store_epoch or node.page_keys is None:
                break
            keys += node.page_keys
        if keys:
            core.outbox.append(Touch(core.components[0].name, keys))
        for component in core.components[1:]:
            others = b"".join(
                core.keys_of(node, component)
                for node in path
                if node.stored_in(component.index) == core.store_epoch
            )
            if others:
                core.outbox.append(Touch(component.name, others, each=True))
        return len(keys) // PAGE_KEY_BYTES
