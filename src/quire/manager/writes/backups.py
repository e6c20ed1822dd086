"""Backups of one component: device → host.

Due by the write policy: full pages as they are computed, windows where a request comes to rest,
snapshots when they are taken; the coldest pages of a device that runs short; and whatever the host
cannot do without (see tree/stays.py) as soon as it can be copied. A page goes to the host with all
before it that the host lacks, so that what the host has never hangs on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from quire.components import Component, Guard
from quire.config import WritePolicy
from quire.manager.core import Core
from quire.manager.operations import BACKUP, COPY_TIMEOUT_S, ENDED, Operation
from quire.manager.writes.stretches import PathStretch, StretchOutcome, outcomes_of, size_of
from quire.messages import Backup
from quire.tree import Node, held_pages, rest, slot_of
from quire.types import DEVICE, FILLING, HOST, READY, PageIds, num_pages

LOOK_AHEAD = 128
"""Cold holdings looked at, at most, for copying out ahead of eviction."""
NEED_DECAY = 0.9
"""By which the most that a step took counts less after each step that moves pages."""

Forgiven = dict[tuple[Node, int], None]
"""Node and device slot of what the host needs a copy of and had no room for."""


class Backups:
    def __init__(
        self,
        core: Core,
        component: Component,
        forgiven: Forgiven,
        backed_up: Callable[[Node], None],
    ) -> None:
        """`backed_up`: the host has a node's pages now."""
        self._core = core
        self._component = component
        self._forgiven = forgiven
        self._backed_up = backed_up
        self._device = slot_of(component.index, DEVICE)
        self._host = slot_of(component.index, HOST)
        self.due: dict[Node, PathStretch] = {}
        """By their lower end."""
        self._need = 0.0
        """Device pages that a step takes, by the largest of the last ones; or that a request will
        take which has arrived."""
        self.expected = 0
        """By the largest request that has arrived since the last look at the cold end."""
        self._clean_until = 0
        """So many pages will have been evicted when those are gone that were seen to at the last
        look."""
        config, device = core.config.write, core.allocators[self._device]
        self._at_once = config.enabled and config.policy is WritePolicy.WRITE_THROUGH
        self._selective = config.policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        self._low_pages = int(config.low_watermark * device.num_pages)
        self._high_pages = int(config.high_watermark * device.num_pages)

    # ---- what becomes due -----------------------------------------------------------------------

    def committed(self, node: Node) -> None:
        if self._at_once and node not in self.due:
            self.want(node)

    def used(self, tail: Node) -> None:
        """Selective write-through counts."""
        for node in self._core.tree.path(tail):
            if self._is_proven(node):
                self.want(node)

    def expect(self, num_pages: int) -> None:
        """A request has arrived that will take so many device pages once it is its turn."""
        self.expected = max(self.expected, num_pages)

    def want(self, node: Node, *, urgent: bool = False, cold: bool = False) -> PathStretch:
        stretch = self.due.get(node)
        if stretch is None:
            stretch = self.due[node] = PathStretch(node, node.start, cold=cold, urgent=urgent)
            node.named += 1
        else:
            stretch.urgent |= urgent
            stretch.cold |= cold
        return stretch

    def owed(self, node: Node) -> None:
        """The host has what is of no use without it. Full pages are copied at once; other state,
        which may soon be of no use itself, when the device runs short of room for it, and to free
        pages only: else two such copies could displace each other for ever."""
        core, device = self._core, self._device
        if device == DEVICE:
            self.want(node, urgent=True)
        elif core.room(device) < max(core.refused.get(device, 0), self._high_pages):
            if core.allocators[self._host].num_free >= size_of(self._component, node):
                self.want(node, urgent=True)
            else:
                self._forgiven[node, device] = None

    def _is_proven(self, node: Node) -> bool:
        return node.hits >= self._core.config.write.selective_hits

    def take_due(self) -> list[PathStretch]:
        due, self.due = self.due, {}
        for node in due:
            node.named -= 1
        return list(due.values())

    def clean_ahead(self) -> None:
        """Short of device pages, by the watermarks and by what steps take: copy out the coldest
        that the host lacks, before they must go. Every copy made too early is room on the host
        that holds nothing new."""
        core = self._core
        need = max(core.taken[self._device], self.expected, self._need * NEED_DECAY)
        core.taken[self._device] = self.expected = 0
        self._need = need
        free, evicted = core.allocators[self._device].num_free, core.counters.evicted_device_pages
        clean = free + self._clean_until - evicted
        if clean >= need and clean >= self._low_pages:
            return
        core.tree.stays.catch_up()
        covered, wanted = free, max(self._high_pages, need)
        for holding in islice(core.tree.standing.coldest(self._device), LOOK_AHEAD):
            if covered >= wanted:
                break
            node = holding.node
            host = node.held[self._host]
            if holding.reasons and (host is None or host.state is READY):
                continue  # in use: it will not make room
            covered += num_pages(holding.pages)
            if host is None and (not self._selective or self._is_proven(node)):
                self.want(node, cold=True)
        self._clean_until = evicted + int(covered) - free

    # ---- copying --------------------------------------------------------------------------------

    def start(self) -> None:
        """Copy what is due."""
        core = self._core
        stretches: list[PathStretch] = []
        guards: list[Guard] = []
        device: list[PageIds] = []
        host: list[PageIds] = []
        for due in self.take_due():
            missing = self._missing(due)
            for at, node in enumerate(missing):
                if guards and not self._is_dirty(node):
                    break  # it went when room was made for those before it
                held = self._reserve_host(node, due)
                if held is None:  # what lies below would hang in the air
                    self._skip(missing[at:], due)
                    break
                # What others have used since stays on the device: its copy is spare.
                stretch = due.of(node)
                stretch.cold = due.cold and node.last_use <= due.tail.last_use
                stretches.append(stretch)
                guards += held
                device.append(held_pages(node, self._device))
                host.append(held_pages(node, self._host))
        if not stretches:
            return
        source, target = PageIds(b"".join(device)), PageIds(b"".join(host))
        op = core.operations.start(
            BACKUP,
            {self._component.name: num_pages(target)},
            timeout_s=COPY_TIMEOUT_S,
            on_report=partial(self._reported, stretches),
            guards=guards,
        )
        core.outbox.append(Backup(op.id, self._component.name, source, target))

    def _missing(self, due: PathStretch) -> list[Node]:
        """What of a stretch the host lacks, and of full pages all before it, parents first."""
        nodes = due.nodes(self._component)
        if self._device == DEVICE:
            above = nodes[0].parent
            while above is not None and above.parent is not None and above.held[HOST] is None:
                nodes.insert(0, above)
                above = above.parent
        return list(filter(self._is_dirty, nodes))

    def _is_dirty(self, node: Node) -> bool:
        """On the device and not on the host."""
        device, host = node.held[self._device], node.held[self._host]
        return device is not None and device.state is READY and host is None

    def _reserve_host(self, node: Node, due: PathStretch) -> list[Guard] | None:
        """Give the node its FILLING host holding; returns the locks on what is copied."""
        core, slot, above = self._core, self._host, node.parent
        assert above is not None
        size = size_of(self._component, node)
        is_free = core.allocators[slot].num_free >= size
        if not is_free and not self._is_worth_room(due):
            return None
        held = core.hold(node, self._device)
        # What it will hang under on the host must not be what makes room for it.
        makes_room = core.has_quotas or not is_free
        path = core.hold(above, HOST) if makes_room and above.held[HOST] is not None else []
        tenant = core.tree.root_of(node).tenant if core.has_quotas else None
        pages = core.reserve(slot, size, tenant)
        if pages is not None:
            core.tree.attach(node, slot, pages, FILLING)
        if path:
            core.unprotect(path)
        if pages is None:
            core.unprotect(held)
            core.tidy((node,))
            return None
        return held

    def _skip(self, nodes: list[Node], due: PathStretch) -> None:
        """The host has no room for these. What owes it a copy may go without one."""
        size = sum(size_of(self._component, node) for node in nodes)
        if self._is_worth_room(due):
            self._core.counters.backup_skipped_pages += size
            for node in nodes:
                self._forgiven[node, self._device] = None
                self._core.tree.stays.forgive(node, self._device)
        else:
            self._core.counters.backup_deferred_pages += size

    def _is_worth_room(self, due: PathStretch) -> bool:
        """May others be evicted from the host for it? A hot page needs its host copy when it grows
        cold, and `clean_ahead` sees to that; before, the copy is worth a free page of the host, or
        the way to the store, but no eviction."""
        return due.urgent or due.cold or self._core.store_epoch > 0

    def _reported(self, stretches: list[PathStretch], op: Operation) -> None:
        if op.state is not ENDED:
            return
        core, slot = self._core, self._host
        outcomes = outcomes_of(core, self._component, op, stretches)
        failed: list[StretchOutcome] = []
        for outcome in outcomes:
            stretch, node, size, statuses = outcome
            if statuses and any(statuses):
                failed.insert(0, outcome)
                continue
            core.tree.make_ready(node, slot)
            core.announce_stored(node, slot)
            if stretch.cold:
                core.tree.standing.keep_spare(node, slot)
            core.counters.backed_up_pages += size
            self._backed_up(node)
        for _, node, size, _ in failed:
            core.counters.backup_failed_pages += size
            core.release(core.tree.detach(node, slot))
        core.finish(op)
        for stretch, node, _, _ in failed:  # what the host cannot do without is tried once more
            if stretch.attempt:
                core.tree.stays.forgive(node, self._device)
            elif (node, self._device) in core.tree.stays.owing:
                self.want(node, urgent=True).attempt = 1
        if not core.store_epoch:  # else they are on their way there
            for _, node, _, _ in outcomes:
                rest(core.tree, node)
