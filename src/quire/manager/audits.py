"""Audits: a cached page and its copies, brought side by side for whoever can compute it again.

    begin ──copies on their way──▶ BRINGING ──all have come, or failed──▶ READY ──end──▶ gone

    page    0 ················ n−1        n
    table   [ where the tree has them, or ) scratch: to be computed into
            [ loaded into scratch pages   )
    copies  the tree's own device page, the host's and the store's, each in a scratch page

Nothing is evicted for it: it takes free pages or does not begin. Nothing grows warmer by it: it
holds no lease and uses no path. Full attention only, and units that are tokens. Knows no tensor
and no model; who asks compares, and says `evict` of what is wrong.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.components import Guard
from quire.keys import Namespace, PrefixKey
from quire.manager.core import Core
from quire.manager.operations import COPY_TIMEOUT_S, Operation, OperationKind, OpState
from quire.messages import Disown, Fetch, Load
from quire.tree import Node, held_pages
from quire.types import (
    DEVICE,
    HOST,
    NO_PAGES,
    PAGE_ID_BYTES,
    PAGE_KEY_BYTES,
    READY,
    PageIds,
    num_pages,
)

_FETCH_TIMEOUT_S = 10.0
_MOST_KEYS = 1 << 16
"""Of pages below a wrong one, that the store is told to give out no more."""


class AuditState(enum.Enum):
    BRINGING = enum.auto()
    READY = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class Audit:
    """One page, the last of `key`, and what is needed to compute it again."""

    key: PrefixKey
    table: PageIds
    """Device pages of all before it, and the scratch page that it is to be computed into."""
    copies: dict[str, PageIds]
    """Where its copy of each tier can be looked at, on the device: device, host, store. Those that
    did not come are missing once it is READY."""
    scratch: PageIds
    landing: PageIds
    """Host page through which the store's copy comes."""
    guards: list[Guard]
    under_way: set[str] = field(default_factory=set)
    is_whole: bool = True
    """Have all pages before it come?"""
    state: AuditState = AuditState.BRINGING


class Audits:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._open: list[Audit] = []

    def begin(self, namespace: Namespace, choose: Callable[[int], int]) -> Audit | None:
        """Some cached page of a namespace; `choose(n)` is any number below n. None: there is none,
        or no room to look at it."""
        core = self._core
        root = core.tree.roots.get(namespace.digest)
        if root is None or len(core.components) > 1:
            return None
        if root.page_width != root.page_bytes:
            return None  # units that are pairs: a page is not a function of its own tokens
        node = _pick(root, choose)
        if node is None:
            return None
        path = list(core.tree.path(node))[::-1]
        return self._reserve(namespace, path, node.start + choose(node.num_pages))

    def begin_at(self, key: PrefixKey) -> Audit | None:
        """The last page of `key`, which is cached. None: there is no room to look at it."""
        walk = self._core.tree.walk(key)
        assert walk.num_pages == key.last
        return self._reserve(key.namespace, list(walk.nodes), key.last - 1)

    def end(self, audit: Audit) -> None:
        """Of one that is READY: everything that it took comes back."""
        assert audit.state is AuditState.READY
        audit.state = AuditState.ENDED
        self._open.remove(audit)
        core = self._core
        core.allocators[DEVICE].free(audit.scratch)
        if audit.landing:
            core.allocators[HOST].free(audit.landing)
        core.unprotect(audit.guards)

    def evict(self, key: PrefixKey) -> int:
        """The last page of `key` is wrong: it goes from every tier, with all that was computed on
        top of it. For when nobody uses the cache. Returns the pages that went."""
        core, tree = self._core, self._core.tree
        assert not core.operations.running
        walk, page = tree.walk(key), key.last - 1
        if walk.num_pages < key.last:
            return 0  # it has gone by itself
        node = walk.nodes[-1]
        if node.start < page:
            tree.split(node, page - node.start)
        doomed = _below(node)
        keys = b"".join(tree.keys_of(each) for each in doomed)[: _MOST_KEYS * PAGE_KEY_BYTES]
        if core.store_epoch:
            core.outbox.append(Disown(core.components[0].name, keys))
        gone = 0
        for each in reversed(doomed):  # what hangs below goes first
            for slot in (DEVICE, HOST):
                holding = each.held[slot]
                if holding is not None and holding.state is READY:
                    freed = tree.condemn(each, slot)
                    gone += sum(num_pages(item.pages) for item in freed)
                    core.release(freed)
        return gone

    @property
    def guards(self) -> list[list[Guard]]:
        return [each.guards for each in self._open]

    def reserved_pages(self, slot: int) -> list[PageIds]:
        """For the check of who owns what."""
        if slot == DEVICE:
            return [each.scratch for each in self._open]
        return [each.landing for each in self._open] if slot == HOST else []

    # ---- inside ---------------------------------------------------------------------------------

    def _reserve(self, namespace: Namespace, path: list[Node], page: int) -> Audit | None:
        core, tail = self._core, path[-1]
        if not core.healthy:
            return None
        device, host = _pages(path, DEVICE), _pages(path, HOST)
        if any(device[i] is None and host[i] is None for i in range(page + 1)):
            return None  # on its way
        wants_host = host[page] is not None
        wants_store = tail.stored == core.store_epoch != 0 and core.allocators[HOST].num_free > 0
        missing = [i for i in range(page) if device[i] is None]
        count = len(missing) + 1 + wants_host + wants_store
        if core.allocators[DEVICE].num_free < count:
            return None
        scratch = core.reserve(DEVICE, count)
        landing = core.reserve(HOST, 1) if wants_store else NO_PAGES
        assert scratch is not None
        assert landing is not None
        single = _singles(scratch)
        filled = dict(zip(missing, single, strict=False))
        own, *others = single[len(missing) :]
        table = b"".join((device[i] or filled[i]) for i in range(page)) + own
        data = b"".join(bytes(node.tokens) for node in path)
        key = PrefixKey(namespace, np.frombuffer(data, dtype="<i4"))[: page + 1]
        audit = Audit(key, PageIds(table), {}, scratch, landing, core.protect(tail, tail))
        if (here := device[page]) is not None:
            audit.copies["device"] = here
        loads = [(filled[i], host[i]) for i in missing]
        if wants_host:
            audit.copies["host"] = others.pop(0)
            loads.append((audit.copies["host"], host[page]))
        if loads:
            targets, sources = zip(*loads, strict=True)
            self._load(audit, "path", b"".join(sources), b"".join(targets))
        if wants_store:
            self._fetch(audit, others.pop(0))
        if not audit.under_way:
            audit.state = AuditState.READY
        self._open.append(audit)
        return audit

    def _load(self, audit: Audit, what: str, host: bytes, device: bytes) -> None:
        core = self._core
        name = core.components[0].name

        def reported(op: Operation) -> None:
            if op.state is OpState.ENDED:
                if op.agreed_pages() < op.num_pages:
                    self._failed(audit, what)
                self._arrived(audit, what)

        audit.under_way.add(what)
        count = len(host) // PAGE_ID_BYTES
        op = core.operations.start(
            OperationKind.LOAD, {name: count}, timeout_s=COPY_TIMEOUT_S, on_report=reported
        )
        core.outbox.append(Load(op.id, name, PageIds(host), PageIds(device)))

    def _fetch(self, audit: Audit, target: PageIds) -> None:
        core = self._core
        name, key = core.components[0].name, audit.key

        def reported(op: Operation) -> None:
            if op.state is OpState.ENDED:
                if op.agreed_pages() == 1:
                    audit.copies["store"] = target
                    self._load(audit, "store", audit.landing, target)
                self._arrived(audit, "fetch")

        audit.under_way.add("fetch")
        op = core.operations.start(
            OperationKind.FETCH, {name: 1}, timeout_s=_FETCH_TIMEOUT_S, on_report=reported
        )
        wanted = key.page_keys(key.last - 1, key.last)
        core.outbox.append(Fetch(op.id, name, wanted, audit.landing, _FETCH_TIMEOUT_S))

    def _failed(self, audit: Audit, what: str) -> None:
        if what == "path":
            audit.is_whole = False
        else:
            audit.copies.pop(what, None)

    def _arrived(self, audit: Audit, what: str) -> None:
        audit.under_way.discard(what)
        if not audit.under_way:
            audit.state = AuditState.READY


def _pick(root: Node, choose: Callable[[int], int]) -> Node | None:
    """A node somewhere below: each has a chance, and none is walked to by way of all others."""
    node: Node | None = None
    at = root
    while at.children:
        stops = 0 if node is None else 1
        number = choose(len(at.children) + stops)
        if number == len(at.children):
            break
        at = node = list(at.children.values())[number]
    return node


def _below(top: Node) -> list[Node]:
    """The node and all that hangs below it, each behind its parent."""
    found, at = [top], 0
    while at < len(found):
        found.extend((found[at].children or {}).values())
        at += 1
    return found


def _pages(path: list[Node], slot: int) -> list[PageIds | None]:
    """Page by page, what a slot has READY of a path."""
    found: list[PageIds | None] = []
    for node in path:
        holding = node.held[slot]
        if holding is None or holding.state is not READY:
            found += [None] * node.num_pages
            continue
        found += _singles(held_pages(node, slot))
    return found


def _singles(pages: PageIds) -> list[PageIds]:
    return [PageIds(pages[i : i + PAGE_ID_BYTES]) for i in range(0, len(pages), PAGE_ID_BYTES)]
