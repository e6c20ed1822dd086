"""State machine: tree and manager against a naive model, for every eviction policy, unit kind and
mix of components.

Requests arrive, load, compute, commit and leave in any order; copies complete, fail or fall short
in any order. Two letters and pages of two units make shared prefixes, splits and duplicates the
rule; pools of a few pages make eviction the rule. The model learns what appears and disappears
from the event stream, and disputes every step of it. Pages have contents: what a request reads,
of whichever component, must be what belongs to its prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from property.model import NaiveCache, Prefix
from quire.components import PoolSize
from quire.config import CacheConfig, PrefetchConfig, SnapshotConfig, WriteConfig, WritePolicy
from quire.eviction import EvictionKind
from quire.keys import Namespace, UnitKind
from quire.manager import CacheManager, EventKind, Lease, LoadState
from quire.messages import Backup, Load, Transferred
from quire.tree import Node, slot_of
from quire.types import (
    NO_SLOT,
    PageIds,
    PageStatus,
    RequestId,
    Residency,
    Tier,
    num_pages,
    page_array,
)
from support import MIXES, components_of

PAGE = 2
DEVICE_PAGES = 11
HOST_PAGES = 9
WINDOW_PAGES = 2
POOLS = {"window": PoolSize(8, 5), "recurrent": PoolSize(7, 4)}

MAX_PAGES = 6
MAX_TOKENS = MAX_PAGES * PAGE + 1
MAX_REQUESTS = 4
MAX_COPIES = 300
token_lists = st.lists(st.integers(0, 1), min_size=PAGE, max_size=MAX_TOKENS)
picks = st.integers(0, 1 << 16)
good_pages = st.sampled_from((99, 99, 99, 0, 1, 2))


@dataclass(eq=False)
class Request:
    tokens: list[int]
    lease: Lease
    num_computed: int = 0
    """Pages after which its working state is; 0: it has not begun."""


class TreeAndManager(RuleBasedStateMachine):
    eviction = EvictionKind.LRU
    mix = "full"

    @initialize(
        unit=st.sampled_from(UnitKind),
        every=st.sampled_from((0, 0, 2)),
        per_path=st.sampled_from((1, 2, 8)),
        policy=st.sampled_from(WritePolicy),
        history=st.lists(token_lists, min_size=2, max_size=6),
    )
    def build(
        self,
        unit: UnitKind,
        every: int,
        per_path: int,
        policy: WritePolicy,
        history: list[list[int]],
    ) -> None:
        """A cache with a past: the interesting states lie far from an empty one."""
        self.now = 0.0
        self.namespace = Namespace("model", "float32", PAGE, unit)
        config = CacheConfig(
            page_size=PAGE,
            device_pages=DEVICE_PAGES,
            host_pages=HOST_PAGES,
            eviction=self.eviction,
            write=WriteConfig(policy=policy, low_watermark=0.3, high_watermark=0.6),
            prefetch=PrefetchConfig(threshold_tokens=PAGE),
            snapshots=SnapshotConfig(every, per_path),
            event_buffer=10_000,
        )
        self.parts = self.mix.split("+")
        components = components_of(self.mix, POOLS, page_size=PAGE, window_pages=WINDOW_PAGES)
        self.manager = CacheManager(config, clock=lambda: self.now, components=components)
        self.model = NaiveCache(self.namespace, self.parts, WINDOW_PAGES)
        self.contents: dict[tuple[str, Tier], dict[int, Prefix]] = {
            (part, tier): {} for part in self.parts for tier in Tier
        }
        """What was last written to each page of each pool."""
        self.requests: list[Request] = []
        self.running: list[Backup | Load] = []
        self.known: list[list[int]] = []
        self.page_of: dict[Prefix, int] = {}
        self.count = 0
        for tokens in history:
            self.serve(tokens, base=0, keep=len(tokens) // 2)

    # ---- rules ----------------------------------------------------------------------------------

    @rule(tokens=token_lists, base=picks, keep=st.integers(0, 12))
    def serve(self, tokens: list[int], base: int, keep: int) -> None:
        """A whole request, with nothing in its way."""
        self.arrive(tokens, base, keep, priority=0)
        mine = len(self.requests) - 1
        self.load(mine)
        self.finish_copies()
        self.compute(mine, count=6, save=True, commit=True)
        self.release(mine)
        self.finish_copies()

    @rule(tokens=token_lists, base=picks, keep=st.integers(0, 12), first=st.integers(1, 6))
    def race(self, tokens: list[int], base: int, keep: int, first: int) -> None:
        """Two requests compute the same pages, and both commit them (C6)."""
        for _ in range(2):
            self.arrive(tokens, base, keep, priority=0)
        mine = len(self.requests) - 1
        self.compute(mine - 1, count=first, save=True, commit=False)
        self.compute(mine, count=6, save=True, commit=True)
        self.commit(mine - 1)

    @rule(base=picks, good=good_pages)
    def reload(self, base: int, good: int) -> None:
        """A known prefix comes back from the host, or comes back only in part."""
        self.flush(Tier.DEVICE)
        if self.known:
            self.arrive([], base, keep=MAX_TOKENS, priority=0)
            self.load(len(self.requests) - 1)
            self.complete(base, good)

    @rule(
        base=picks,
        keep=st.integers(1, 12),
        good=good_pages,
        emptied=st.booleans(),
        counted_on=st.booleans(),
    )
    def overtake(self, base: int, keep: int, good: int, emptied: bool, counted_on: bool) -> None:
        """The end of a prefix comes back before its beginning, which may not come at all. One who
        has seen that remains, and may count on it, and the host may have let go of its copies."""
        self.finish_copies()
        self.flush(Tier.DEVICE)
        ahead = 0
        for tokens in (keep, MAX_TOKENS):
            ahead = len(self.running)
            self.arrive([], base, tokens, priority=0)
            self.load(len(self.requests) - 1)
            self._exchange([])
        while len(self.running) > ahead:
            self.complete(len(self.running) - 1, good=99)
        for _ in range(2):
            self.release(len(self.requests) - 1)
        self.arrive([], base, MAX_TOKENS, priority=0)
        if counted_on:
            self.load(len(self.requests) - 1)
        if emptied:
            self.flush(Tier.HOST)
        for _ in range(ahead):
            self.complete(0, good)

    @rule()
    def finish_copies(self) -> None:
        self._exchange([])
        for _ in range(MAX_COPIES):
            if not self.running:
                return
            self.complete(pick=0, good=99)
        raise AssertionError("copies make work for each other, for ever")

    @rule(tokens=token_lists, base=picks, keep=st.integers(0, 12), priority=st.integers(0, 2))
    def arrive(self, tokens: list[int], base: int, keep: int, priority: int) -> None:
        """Acquire: what was matched is what is protected; a split changes no match (C5)."""
        if len(self.requests) == MAX_REQUESTS:
            self.release(base)
        if self.known:
            tokens = (self.known[base % len(self.known)][:keep] + tokens)[:MAX_TOKENS]
        key = self.model.learn(tokens)
        match = self.manager.match(key)
        assert (match.num_device, match.num_host) == self.model.match(tokens)
        before = self._all_matches()
        self.count += 1
        owner = RequestId(f"r{self.count}")
        lease = self.manager.acquire(match, owner, priority=priority)
        assert self._all_matches() == before
        assert (lease.num_device, lease.num_host) == (match.num_device, match.num_host)
        self.known.append(tokens)
        self.requests.append(Request(tokens, lease))
        self._check_shared_pages(self.requests[-1])

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def load(self, pick: int) -> None:
        request = self._pick(pick)
        if request.lease.private_pages:
            return
        before = request.lease.num_device
        gained = self.manager.load(request.lease)
        assert request.lease.num_device == before + gained
        if gained:
            request.num_computed = 0  # it goes on from there, whatever it has computed
        self._follow_events()

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def admit(self, pick: int) -> None:
        """Take in what others have brought meanwhile."""
        request = self._pick(pick)
        lease = request.lease
        if request.num_computed or lease.private_pages or lease.load_state is not LoadState.IDLE:
            return
        usable = self.manager.admit(lease)
        self._follow_events()
        if not self._drains(lease.tail):
            assert usable >= sum(self.model.match(request.tokens))

    @precondition(lambda self: self.requests)
    @rule(pick=picks, pressed=st.booleans())
    def yield_device(self, pick: int, pressed: bool) -> None:
        """What the host has of its prefix stays its own, whatever happens on the device (C38)."""
        request = self._pick(pick)
        lease = request.lease
        if request.num_computed or lease.private_pages or lease.load_state is not LoadState.IDLE:
            return
        self.manager.yield_device(lease)
        self._follow_events()
        self.manager.check_invariants()
        kept = lease.num_host
        assert lease.num_device == 0
        if pressed:
            self.manager.flush(Tier.DEVICE)
            self._follow_events()
        assert self.manager.admit(lease) >= kept
        self._follow_events()

    @precondition(lambda self: self.requests)
    @rule(pick=picks, count=st.integers(1, 6), save=st.booleans(), commit=st.booleans())
    def compute(self, pick: int, count: int, save: bool, commit: bool) -> None:
        """Allocation evicts no more than it must, gives up only when too little may go (C7), and
        changes nothing then (C34)."""
        request = self._pick(pick)
        lease = request.lease
        first = num_pages(lease.pages)
        last = min(first + count, len(self.model.prefixes(request.tokens)))
        if lease.load_state is LoadState.FAILED or last <= first or not self._begin(request):
            return
        last = self.manager.next_stop(lease, first, last)
        free = self._free(Tier.DEVICE)
        extended = self.manager.extend(lease, last - first)
        removed = self._follow_events()
        if removed["device"]:
            assert free < last - first, "evicted without need"
        if extended:
            assert self._free(Tier.DEVICE) == free - (last - first) + len(removed["device"])
        else:
            assert not any(removed.values()), "gave up and evicted all the same"
            if self.manager.idle and not self.manager._core.tree.stays.owing:
                may_go = self.model.device - self._on_leased_paths()
                assert free + len(may_go) < last - first, "gave up with pages to evict"
        covered = self.manager.cover(lease, num_pages(lease.pages))
        self._follow_events()
        if covered and lease.private_pages:
            self._write(request, save=save)
        if commit:
            self.commit(pick)

    @precondition(lambda self: self.requests)
    @rule(pick=picks, page=st.integers(1, MAX_PAGES))
    def expect_branch(self, pick: int, page: int) -> None:
        self.manager.expect_branch(self._pick(pick).lease, page)

    def _begin(self, request: Request) -> bool:
        """The request has a working state of its own, as it was where its pages end (C20)."""
        lease = request.lease
        begun = self.manager.begin(lease)
        self._follow_events()
        state = lease.state.recurrent if lease.state is not None else None
        if not begun or state is None:
            return begun
        restored = state.restore
        if request.num_computed == 0 and lease.load_state is LoadState.IDLE:
            states = self.contents["recurrent", Tier.DEVICE]
            path = self.model.prefixes(request.tokens)[: lease.num_device]
            assert (restored != NO_SLOT) == bool(path)
            if path:
                assert states[restored] == path[-1]
        assert restored not in page_array(state.own_slots()).tolist()
        return True

    def _write(self, request: Request, *, save: bool) -> None:
        """The engine fills the request's own pages and states."""
        lease = request.lease
        path = self.model.prefixes(request.tokens)
        request.num_computed = num_pages(lease.pages)
        self._fill("full", lease.private_pages, path[lease.num_device :])
        if lease.state is None:
            return
        window, recurrent = lease.state.window, lease.state.recurrent
        if window is not None:
            first = window.first + num_pages(window.tree_pages)
            assert window.first <= max(0, lease.num_device - WINDOW_PAGES)
            self._fill("window", window.private_pages, path[first:])
        if recurrent is None:
            return
        recurrent.restore = NO_SLOT  # it has been copied to the request's own
        reached = path[request.num_computed - 1]
        written = [recurrent.slot]
        if save and (slot := self.manager.save_slot(lease)) != NO_SLOT:
            self._follow_events()
            self.manager.saved(lease, request.num_computed)
            written.append(slot)
        assert set(written) == set(page_array(recurrent.own_slots()).tolist()) - (
            set() if save else {recurrent.saved_slot}
        )
        for slot in written:
            self.contents["recurrent", Tier.DEVICE][slot] = reached

    def _fill(self, part: str, pages: PageIds, path: list[Prefix]) -> None:
        for page, prefix in zip(page_array(pages).tolist(), path, strict=False):
            self.contents[part, Tier.DEVICE][page] = prefix

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        """Insert, then match covers it (C5); exactly the duplicates are freed (C6)."""
        request = self._pick(pick)
        lease = request.lease
        blocked = bool(lease.loads) or lease.load_state is LoadState.FAILED
        first, held = lease.num_device, num_pages(lease.private_pages)
        mine = page_array(lease.private_pages).tolist()
        free, had = self._free(Tier.DEVICE), set(self.model.device)
        key = self.model.learn(request.tokens)
        shared = self.manager.commit(lease, key)
        removed = self._follow_events()
        offered = self.model.prefixes(request.tokens)[first : first + min(held, key.last - first)]
        assert shared <= len(offered)
        if blocked:
            assert shared == 0
            return
        draining = any(self._drains(other.lease.tail) for other in self.requests)
        covered = (
            lease.state is None
            or lease.state.window is None
            or (lease.state.window.end >= first + len(offered))
        )
        if self.manager.idle and not draining and covered:
            assert shared == len(offered)
        duplicates = [prefix for prefix in offered[:shared] if prefix in had]
        assert not removed["device"]
        assert self._free(Tier.DEVICE) == free + len(duplicates)
        if "recurrent" not in self.parts and not draining:
            assert self.manager.match(key).num_device >= first + shared
        table = page_array(lease.pages).tolist()
        for index, prefix in enumerate(offered[:shared]):
            taken = table[first + index]
            if prefix not in had:
                assert taken == mine[index]
            assert self.page_of.setdefault(prefix, taken) == taken
        self._check_shared_pages(request)

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        request = self._pick(pick)
        self.requests.remove(request)
        before = self._all_matches()
        self.manager.release(request.lease)
        removed = self._follow_events()
        if self.mix == "full":
            assert not removed["device"]
            assert not removed["host"]
        # Windows are kept where one is expected to go on, snapshots within their budget.
        if "window" not in self.parts and self.manager.config.snapshots.per_path >= MAX_PAGES:
            after = self._all_matches()
            assert all(sum(b) <= sum(a) for b, a in zip(before, after, strict=True))

    @rule(seconds=st.sampled_from((0.0, 0.1, 0.1, 5.0, 100.0)))
    def step(self, seconds: float) -> None:
        self.now += seconds
        self._exchange([])

    @rule(pick=picks, good=good_pages)
    def complete(self, pick: int, good: int) -> None:
        """Some copy ends: whole, short or not at all."""
        if not self.running:
            self._exchange([])
        if not self.running:
            return
        command = self.running.pop(pick % len(self.running))
        count = num_pages(command.host)
        bad = max(0, count - good)
        statuses = bytes([PageStatus.OK] * (count - bad) + [PageStatus.FAILED] * bad)
        self._copy(command, statuses)
        self._exchange([Transferred(command.op, 0, command.component, 0, statuses, final=True)])

    def _copy(self, command: Backup | Load, statuses: bytes) -> None:
        device = self.contents[command.component, Tier.DEVICE]
        host = self.contents[command.component, Tier.HOST]
        pairs = zip(page_array(command.device), page_array(command.host), strict=True)
        for (at_device, at_host), status in zip(pairs, statuses, strict=True):
            if isinstance(command, Load):
                device.pop(int(at_device), None)
                if status == PageStatus.OK:
                    device[int(at_device)] = host[int(at_host)]
            else:
                host.pop(int(at_host), None)
                if status == PageStatus.OK:
                    host[int(at_host)] = device[int(at_device)]

    @rule(tier=st.sampled_from(Tier))
    def flush(self, tier: Tier) -> None:
        """Everything goes that nobody uses, and nothing else (C7)."""
        for part in self.parts:
            self._evict(part, tier)
        if tier is Tier.DEVICE and self.manager.idle:
            assert self.model.device <= self._on_leased_paths()

    @rule(part=picks, tier=st.sampled_from(Tier))
    def evict(self, part: int, tier: Tier) -> None:
        """One component leaves a tier, and what is of no use without it (C23)."""
        self._evict(self.parts[part % len(self.parts)], tier)

    def _evict(self, part: str, tier: Tier) -> None:
        free = self._free(tier, part)
        freed = self.manager.flush(tier, part)
        removed = self._follow_events(part)
        name = tier.name.lower()
        assert self._free(tier, part) - free >= freed
        assert len(removed[name]) == self._free(tier, part) - free
        if self.manager.idle and (part != "full" or tier is Tier.DEVICE):
            assert self.model.held[part][name] <= self._on_leased_paths()

    @precondition(lambda self: self.known)
    @rule(pick=picks, tokens=token_lists)
    def match(self, pick: int, tokens: list[int]) -> None:
        """A match is right, idempotent, and changes nothing (C5)."""
        state = self.manager._core.tree.changes
        for wanted in (self.known[pick % len(self.known)], tokens):
            key = self.model.learn(wanted)
            first, second = self.manager.match(key), self.manager.match(key)
            assert first == second
            assert (first.num_device, first.num_host) == self.model.match(wanted)
        assert self.manager._core.tree.changes == state
        assert not self.manager.events.take().events

    # ---- always ---------------------------------------------------------------------------------

    @invariant()
    def bookkeeping_holds(self) -> None:
        """C8: everything kept incrementally equals its definition."""
        if hasattr(self, "manager"):
            self.manager.check_invariants()

    @invariant()
    def leased_pages_are_there(self) -> None:
        """C7: what a live lease uses is in the tier it was promised in."""
        for request in getattr(self, "requests", []):
            lease = request.lease
            if lease.load_state is not LoadState.IDLE:
                continue
            path = self.model.prefixes(request.tokens)
            for prefix in path[: lease.num_device]:
                assert prefix in self.model.device
            self._check_contents(lease, path)
            if self._drains(lease.tail):
                continue  # a failed load of somebody else's is not cleared away yet
            if request.num_computed == 0:
                assert self.model.is_usable(path[: lease.tail.end], ("device", "host"))

    def _check_contents(self, lease: Lease, path: list[Prefix]) -> None:
        """What a request may read is what belongs to its prefix."""
        tables = {"full": (0, lease.tree_pages)}
        if lease.state is not None and (window := lease.state.window) is not None:
            tables["window"] = (window.first, window.tree_pages)
        for part, (first, table) in tables.items():
            pages = page_array(table).tolist()
            held = [self.contents[part, Tier.DEVICE].get(page) for page in pages]
            assert held == path[first : first + len(pages)], part

    @invariant()
    def nothing_readable_has_wrong_contents(self) -> None:
        for node in self._nodes():
            path = self.model.named(self._key_chain(node))
            for part in self.parts:
                for tier in Tier:
                    holding = node.held[slot_of(self.parts.index(part), tier)]
                    if holding is not None and holding.state is Residency.READY:
                        pages = page_array(holding.pages).tolist()
                        held = [self.contents[part, tier].get(page) for page in pages]
                        assert held == path[-len(pages) :]

    def _nodes(self) -> Iterator[Node]:
        if hasattr(self, "manager"):
            stack: list[Node] = [
                child
                for root in self.manager._core.tree.roots.values()
                for child in (root.children or {}).values()
            ]
            while stack:
                node = stack.pop()
                stack += (node.children or {}).values()
                yield node

    def _key_chain(self, node: Node) -> bytes:
        return self.manager._core.tree.keys_of(node)

    def teardown(self) -> None:
        """Everything comes back, whatever state it is left in."""
        if not hasattr(self, "manager"):
            return
        while self.requests:
            self.release(0)
        self.finish_copies()
        for tier in (Tier.DEVICE, Tier.HOST):
            self.manager.flush(tier)
        self.manager.check_invariants()
        assert all(pool.num_free == pool.num_pages for pool in self.manager._core.allocators)
        assert not self.manager._core.tree.roots

    # ---- inside ---------------------------------------------------------------------------------

    def _exchange(self, reports: list[Transferred]) -> None:
        for command in self.manager.step(reports):
            assert isinstance(command, Backup | Load)
            self.running.append(command)
        self._follow_events()
        for request in self.requests:
            self._check_shared_pages(request)

    def _follow_events(self, part: str = "full") -> dict[str, list[Prefix]]:
        """Update the model; returns what was removed of a component, by tier."""
        batch = self.manager.events.take()
        assert batch.lost == 0
        removed: dict[str, list[Prefix]] = {"device": [], "host": []}
        locked = {name: self._locked_on_device(name) for name in self.parts}
        for event in batch.events:
            held = self.model.held[event.component][event.tier]
            for prefix in self.model.named(event.keys):
                if event.kind is EventKind.STORED:
                    assert prefix not in held
                    held.add(prefix)
                    continue
                assert prefix in held
                held.remove(prefix)
                if event.component == part:
                    removed[event.tier].append(prefix)
                if event.tier == "device":
                    assert prefix not in locked[event.component], "evicted under a lease"
                    if event.component == "full":
                        self.page_of.pop(prefix, None)
        return removed

    def _locked_on_device(self, part: str) -> set[Prefix]:
        """Prefixes that live leases use on the device."""
        return {
            prefix
            for request in self.requests
            if request.lease.load_state is LoadState.IDLE
            and (part == "full" or not request.num_computed)
            for prefix in self.model.needed(
                part, self.model.prefixes(request.tokens)[: request.lease.num_device]
            )
        }

    def _drains(self, tail: Node) -> bool:
        """Is a page of a failed load still on the path, for somebody who counted on it?"""
        held = [holding for node in self.manager._core.tree.path(tail) for holding in node.held]
        return any(h is not None and h.state is Residency.DRAINING for h in held)

    def _on_leased_paths(self) -> set[Prefix]:
        """Prefixes that live leases may keep on the device, failed loads included."""
        return {
            prefix
            for request in self.requests
            for prefix in self.model.prefixes(request.tokens)[: request.lease.tail.end]
        }

    def _check_shared_pages(self, request: Request) -> None:
        """Requests with a common prefix have the same pages for it."""
        if request.lease.load_state is not LoadState.IDLE:
            return
        path = self.model.prefixes(request.tokens)
        for prefix, page in zip(path, page_array(request.lease.tree_pages).tolist(), strict=False):
            assert self.page_of.setdefault(prefix, page) == page

    def _all_matches(self) -> list[tuple[int, int]]:
        found = [self.manager.match(self.model.learn(tokens)) for tokens in self.known[-12:]]
        return [(match.num_device, match.num_host) for match in found]

    def _pick(self, pick: int) -> Request:
        return self.requests[pick % len(self.requests)]

    def _free(self, tier: Tier, part: str = "full") -> int:
        return self.manager._core.allocators[slot_of(self.parts.index(part), tier)].num_free


@pytest.mark.parametrize("kind", EvictionKind)
@pytest.mark.parametrize("mix", MIXES)
def test_tree_and_manager_agree_with_a_naive_model_c5_c6_c7_c8_c19_c20_c23(
    mix: str, kind: EvictionKind
) -> None:
    fields = {"eviction": kind, "mix": mix}
    machine = type(f"TreeAndManager{kind.name}", (TreeAndManager,), fields)
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=40))
