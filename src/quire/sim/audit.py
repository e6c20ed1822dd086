"""Audit: compare everything the tree calls READY with what it must contain.

Requests see only what they happen to use; this sees a wrong page at once, in both pools. Also the
mirror of the event stream: what a subscriber believes must be what the tree holds. And what
quire.sim.watch compares: the one place where it looks behind the manager.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields

from quire.keys import chain_keys
from quire.manager import CacheManager, EventKind, Lease, PrefetchState
from quire.manager.counters import Counters
from quire.manager.inspection import inspect
from quire.manager.operations import OpState
from quire.sim.content import Oracle, Pools
from quire.sim.report import SimulationError
from quire.tree import Node, PrefixTree, Root, slot_of
from quire.types import (
    HOST,
    PAGE_KEY_BYTES,
    OperationId,
    PageKey,
    Residency,
    Tier,
    num_pages,
    page_array,
    split_keys,
)


def audit(manager: CacheManager, oracle: Oracle, pools: Pools, ranks: list[int]) -> int:
    """Check every READY page on `ranks`, and all names; returns how many pages were checked."""
    _check_keys(inspect(manager).tree)
    _check_leases(manager)
    checked = 0
    for node, contents in _contents(inspect(manager).tree, oracle):
        for component in manager.components:
            due = contents[-1:] if component.is_point else contents
            for tier in Tier:
                holding = node.held[slot_of(component.index, tier)]
                if holding is None or holding.state is not Residency.READY:
                    continue
                wrong = pools.first_wrong(tier, holding.pages, due, ranks, component.name)
                checked += num_pages(holding.pages) * len(ranks)
                if wrong is not None:
                    rank, index = wrong
                    raise SimulationError(
                        f"{component.name} page {index} of {node} is READY on the "
                        f"{tier.name.lower()} of rank {rank} and holds something else"
                    )
    return checked


def _check_keys(tree: PrefixTree) -> None:
    """C4: keys that nodes remember are those of their whole path."""
    for root in tree.roots.values():
        stack = [(node, root.digest) for node in (root.children or {}).values()]
        while stack:
            node, before = stack.pop()
            keys = chain_keys(before, bytes(node.tokens), root.page_bytes, root.page_width)
            if node.page_keys is not None and node.page_keys != keys:
                raise SimulationError(f"{node} goes by the keys of other pages")
            last = PageKey(keys[-PAGE_KEY_BYTES:])
            stack += [(child, last) for child in (node.children or {}).values()]


def _check_leases(manager: CacheManager) -> None:
    """What a lease stands on is a prefix of what it was taken for."""
    for lease in manager.leases:
        key = lease.key
        for tail in (lease.tail, lease.device_tail):
            for node in inspect(manager).tree.path(tail):
                if not key.data.startswith(node.tokens, node.start * key.page_bytes):
                    raise SimulationError(f"{lease.owner} stands on {node} of another prompt")


def _contents(tree: PrefixTree, oracle: Oracle) -> Iterator[tuple[Node, list[int]]]:
    """Every node with what its pages must contain."""
    for root in tree.roots.values():
        step = root.page_bytes
        stack: list[tuple[Node, int]] = [(root, oracle.root(root.digest))]
        while stack:
            node, content = stack.pop()
            if not isinstance(node, Root):
                contents = []
                for start in range(0, len(node.tokens) - root.page_width + 1, step):
                    page = bytes(node.tokens[start : start + root.page_width])
                    content = oracle.page_after(content, page)
                    contents.append(content)
                yield node, contents
            stack.extend((child, content) for child in (node.children or {}).values())


class EventMirror:
    """What a subscriber to the events believes to be in each pool."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], set[PageKey]] = defaultdict(set)
        """By tier and component."""
        self._complete = True

    def follow(self, manager: CacheManager) -> None:
        batch = manager.events.take()
        self._complete = self._complete and batch.lost == 0
        for event in batch.events:
            if event.tier == "store":
                continue  # it forgets on its own
            held = self._held[event.tier, event.component]
            keys = split_keys(event.keys)
            if event.kind is EventKind.STORED:
                _require(held.isdisjoint(keys), f"stored twice in {event.tier}")
                held.update(keys)
            else:
                _require(held.issuperset(keys), f"removed without being in {event.tier}")
                held.difference_update(keys)

    def compare(self, manager: CacheManager) -> None:
        """The mirror must equal the tree."""
        if not self._complete:
            return
        inside = inspect(manager)
        for component in inside.components:
            for tier in Tier:
                ready: set[PageKey] = set()
                for node in inside.nodes():
                    holding = node.held[slot_of(component.index, tier)]
                    if holding is not None and holding.state is Residency.READY:
                        ready.update(split_keys(inside.keys_of(node, component)))
                name = tier.name.lower()
                seen = self._held[name, component.name]
                _require(ready == seen, f"a subscriber sees another {name} pool")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise SimulationError(f"events: {what}")


# ---- what quire.sim.watch needs to see around every call -----------------------------------------


def ready_host_pages(manager: CacheManager) -> frozenset[int]:
    """Host pages of `full` that can be used."""
    found: list[int] = []
    for node in inspect(manager).nodes():
        holding = node.held[HOST]
        if holding is not None and holding.state is Residency.READY:
            found += page_array(holding.pages).tolist()
    return frozenset(found)


def evicted_from_host(manager: CacheManager) -> int:
    """Host pages of all components given up for want of host memory, since the start."""
    counters = manager.counters
    return counters.evicted_host_pages + counters.evicted_spare_pages


_COUNTED = [
    f.name
    for f in fields(Counters)
    if f.default == 0 and not any(w in f.name for w in ("_failures", "_declined", "_skipped"))
]
"""Numbers that no refusal changes."""


def imprint(manager: CacheManager) -> dict[str, int]:
    """Numbers that change with whatever a call does, but for counting that it said no."""
    inside, counters, locks = inspect(manager), manager.counters, 0
    for node in inside.nodes():
        for holding in node.held:
            if holding is not None:
                locks += holding.locks
    found = {f"free pages of slot {i}": a.num_free for i, a in enumerate(inside.allocators)}
    found |= {"changes of the tree": inside.tree.changes, "commands": inside.num_commands}
    found |= {"locks": locks, "faults": counters.faults.total()}
    found["prefetches"] = counters.fetched.total()
    for name in _COUNTED:
        found[name] = getattr(counters, name)
    return found


def is_awaited(manager: CacheManager, op: OperationId) -> bool:
    """Is it under way, and does somebody wait for it?"""
    operation = manager.operations.running.get(op)
    return operation is not None and operation.state is OpState.RUNNING


def is_streamed(manager: CacheManager, op: OperationId) -> bool:
    """Does it go through the host to one request's own pages, where nobody else can find it?"""
    return inspect(manager).fetches.is_part(op)


def is_prefetching(lease: Lease) -> bool:
    return lease.prefetch is not None and lease.prefetch.state is not PrefetchState.DONE
