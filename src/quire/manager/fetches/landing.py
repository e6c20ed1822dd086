"""Pages that have arrived in a tier enter the tree: from the store, or from a peer.

Knows the tree and the allocators. With several components what is put there is a point: all full
pages up to it, the window behind it and the snapshot at it, together.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.components import Component
from quire.keys import PrefixKey
from quire.manager.core import Core
from quire.tree import NUM_TIERS, Holding, Node, slot_of
from quire.types import HOST, NO_PAGES, PAGE_ID_BYTES, READY, PageIds, num_pages


@dataclass(frozen=True, slots=True)
class Arrival:
    """Pages of a prefix, all there: of each component those of its span of [first, last)."""

    key: PrefixKey
    first: int
    last: int
    pages: list[PageIds]
    epoch: int
    """Of the store they came from; 0: the store may not have them."""
    tier: int = HOST


def land(core: Core, anchor: Node, arrival: Arrival) -> Node:
    """Hang them under `anchor`, which ends at page `first`. What somebody else put there before is
    freed, and so is what has no place. Returns the end of what is there now."""
    grown = core.tree.walk(arrival.key, anchor).nodes[-1:] if core.upkeep is not None else []
    tail = _land_full(core, anchor, arrival)
    for component in core.components[1:]:
        _land_other(core, component, tail, arrival)
    # A leaf that has grown is no point any more, wherever it lay below the anchor. Nobody holds
    # what has just come: it must not go with that.
    held = core.protect(tail, tail) if grown else []
    core.tidy(node for node in grown if node is not tail)
    core.unprotect(held)
    return tail


def obstacle(core: Core, anchor: Node, key: PrefixKey, last: int, tier: int = HOST) -> int:
    """Page before which nothing hinders full pages from being put under `anchor`: behind it a copy
    of the same page is on its way to the tier, or on its way out."""
    for node in core.tree.walk(key, anchor).nodes:
        if _is_moving(node, tier):
            return min(last, node.start)
    return last


def hindrance(core: Core, anchor: Node, key: PrefixKey, last: int) -> Holding | None:
    """A copy of state that belongs to the point at page `last`, or of full pages before it, that is
    on its way to the host, or out; None: nothing hinders."""
    nodes = core.tree.walk(key, anchor).nodes
    for component in core.components:
        slot, (start, end) = slot_of(component.index, HOST), component.span(anchor.end, last)
        for node in nodes:
            if node.end > start and node.start < end and _is_moving(node, slot):
                return node.held[slot]
    return None


def _is_moving(node: Node, slot: int) -> bool:
    holding = node.held[slot]
    return holding is not None and holding.state is not READY


def _land_full(core: Core, anchor: Node, arrival: Arrival) -> Node:
    key, pages, tier = arrival.key, arrival.pages[0], arrival.tier
    done = core.tree.insert(anchor, key, arrival.last, tier, pages)
    leftover = PageIds(pages[(done.tail.end - arrival.first) * PAGE_ID_BYTES :])
    core.allocators[tier].free(PageIds(done.duplicate + leftover))
    core.counters.duplicate_pages += num_pages(done.duplicate)
    for node in done.adopted:
        node.page_keys = key.page_keys(node.start, node.end)
        if arrival.epoch:
            node.stored = arrival.epoch
        core.announce_stored(node, tier)
    return done.tail


def _land_other(core: Core, component: Component, tail: Node, arrival: Arrival) -> None:
    """Hang what belongs to the point at `tail` beside its full pages."""
    slot, pages = slot_of(component.index, arrival.tier), arrival.pages[component.index]
    start, end = component.span(arrival.first, arrival.last)
    spare: list[bytes] = []
    if tail.end != end:  # a page of `full` could not be put there
        spare.append(pages)
    elif component.is_point:
        spare.append(_hang(core, tail, slot, pages, arrival.epoch))
    else:
        node = tail
        while node.parent is not None and node.end > start:
            if node.start < start:
                core.tree.split(node, start - node.start)
            mine = pages[(node.start - start) * PAGE_ID_BYTES : (node.end - start) * PAGE_ID_BYTES]
            spare.append(_hang(core, node, slot, PageIds(mine), arrival.epoch))
            node = node.parent
    core.allocators[slot].free(PageIds(b"".join(spare)))


def _hang(core: Core, node: Node, slot: int, pages: PageIds, epoch: int) -> PageIds:
    """Give a node its pages; returns them if it has them already."""
    if node.held[slot] is not None:
        core.counters.duplicate_pages += num_pages(pages)
        return pages
    core.tree.attach(node, slot, pages, READY)
    if epoch:
        node.set_stored(slot // NUM_TIERS, epoch)
    core.announce_stored(node, slot)
    return NO_PAGES
