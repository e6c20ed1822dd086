"""State machine: tree and manager against a naive model, for every eviction policy and unit kind.

Requests arrive, load, compute, commit and leave in any order; copies complete, fail or fall short
in any order. Two letters and pages of two units make shared prefixes, splits and duplicates the
rule; pools of a few pages make eviction the rule. The model learns what appears and disappears
from the event stream, and disputes every step of it.
"""

from __future__ import annotations

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
from quire.config import CacheConfig, PrefetchConfig, WriteConfig, WritePolicy
from quire.eviction import EvictionKind
from quire.keys import Namespace, UnitKind
from quire.manager import CacheManager, EventKind, Lease, LoadState
from quire.messages import Backup, Load, Transferred
from quire.tree import Node
from quire.types import PageStatus, RequestId, Residency, Tier, num_pages, page_array

PAGE = 2
DEVICE_PAGES = 11
HOST_PAGES = 9

MAX_TOKENS = 6 * PAGE + 1
MAX_REQUESTS = 4
token_lists = st.lists(st.integers(0, 1), min_size=PAGE, max_size=MAX_TOKENS)
picks = st.integers(0, 1 << 16)
good_pages = st.sampled_from((99, 99, 99, 0, 1, 2))


@dataclass(eq=False)
class Request:
    tokens: list[int]
    lease: Lease


class TreeAndManager(RuleBasedStateMachine):
    eviction = EvictionKind.LRU

    @initialize(
        unit=st.sampled_from(UnitKind),
        policy=st.sampled_from(WritePolicy),
        history=st.lists(token_lists, min_size=2, max_size=6),
    )
    def build(self, unit: UnitKind, policy: WritePolicy, history: list[list[int]]) -> None:
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
            event_buffer=10_000,
        )
        self.manager = CacheManager(config, clock=lambda: self.now)
        self.model = NaiveCache(self.namespace)
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
        self.compute(mine, count=6, commit=True)
        self.release(mine)
        self.finish_copies()

    @rule(tokens=token_lists, base=picks, keep=st.integers(0, 12), first=st.integers(1, 6))
    def race(self, tokens: list[int], base: int, keep: int, first: int) -> None:
        """Two requests compute the same pages, and both commit them (C6)."""
        for _ in range(2):
            self.arrive(tokens, base, keep, priority=0)
        mine = len(self.requests) - 1
        self.compute(mine - 1, count=first, commit=False)
        self.compute(mine, count=6, commit=True)
        self.commit(mine - 1)

    @rule(base=picks, good=good_pages)
    def reload(self, base: int, good: int) -> None:
        """A known prefix comes back from the host, or comes back only in part."""
        self.flush(Tier.DEVICE)
        if self.known:
            self.arrive([], base, keep=MAX_TOKENS, priority=0)
            self.load(len(self.requests) - 1)
            self.complete(base, good)

    @rule()
    def finish_copies(self) -> None:
        self._exchange([])
        while self.running:
            self.complete(pick=0, good=99)

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
        self._follow_events()

    @precondition(lambda self: self.requests)
    @rule(pick=picks, count=st.integers(1, 6), commit=st.booleans())
    def compute(self, pick: int, count: int, commit: bool) -> None:
        """Allocation evicts no more than it must, and gives up only when nothing may go (C7)."""
        request = self._pick(pick)
        missing = len(self.model.prefixes(request.tokens)) - num_pages(request.lease.pages)
        count = min(count, missing)
        if count <= 0:
            return
        free = self._free(Tier.DEVICE)
        extended = self.manager.extend(request.lease, count)
        removed = self._follow_events()
        if removed["device"]:
            assert free < count, "evicted without need"
        if extended:
            assert self._free(Tier.DEVICE) == free - count + len(removed["device"])
        elif self.manager.idle:
            assert self.model.device <= self._on_leased_paths(), "gave up with pages to evict"
        if commit:
            self.commit(pick)

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
        self._follow_events()
        offered = self.model.prefixes(request.tokens)[first : first + min(held, key.last - first)]
        assert shared <= len(offered)
        if blocked:
            assert shared == 0
            return
        draining = any(self._drains(other.lease.tail) for other in self.requests)
        if self.manager.idle and not draining:
            assert shared == len(offered)
        duplicates = [prefix for prefix in offered[:shared] if prefix in had]
        assert self._free(Tier.DEVICE) == free + len(duplicates)
        assert self.manager.match(key).num_device >= first + shared
        table = page_array(lease.pages).tolist()
        for index, prefix in enumerate(offered[:shared]):
            taken = table[first + index]
            assert taken == (self.page_of[prefix] if prefix in had else mine[index])
            self.page_of[prefix] = taken
        self._check_shared_pages(request)

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        request = self._pick(pick)
        self.requests.remove(request)
        self.manager.release(request.lease)
        removed = self._follow_events()
        assert not removed["device"]
        assert not removed["host"]

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
        self._exchange([Transferred(command.op, 0, command.component, 0, statuses, final=True)])

    @rule(tier=st.sampled_from(Tier))
    def flush(self, tier: Tier) -> None:
        """Everything goes that nobody uses, and nothing else (C7)."""
        free = self._free(tier)
        freed = self.manager.flush(tier)
        self._follow_events()
        assert self._free(tier) == free + freed
        if tier is Tier.DEVICE and self.manager.idle:
            assert self.model.device <= self._on_leased_paths()

    @precondition(lambda self: self.known)
    @rule(pick=picks, tokens=token_lists)
    def match(self, pick: int, tokens: list[int]) -> None:
        """A match is right, idempotent, and changes nothing (C5)."""
        state = self.manager.core.tree.changes
        for wanted in (self.known[pick % len(self.known)], tokens):
            key = self.model.learn(wanted)
            first, second = self.manager.match(key), self.manager.match(key)
            assert first == second
            assert (first.num_device, first.num_host) == self.model.match(wanted)
        assert self.manager.core.tree.changes == state
        assert not self.manager.take_events().events

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
            if self._drains(lease.tail):
                continue  # a failed load of somebody else's is not cleared away yet
            for prefix in path[lease.num_device : lease.tail.end]:
                assert prefix in self.model.host or prefix in self.model.device

    def teardown(self) -> None:
        """Everything comes back, whatever state it is left in."""
        if not hasattr(self, "manager"):
            return
        for request in self.requests:
            self.manager.release(request.lease)
        self.finish_copies()
        for tier in (Tier.DEVICE, Tier.HOST):
            self.manager.flush(tier)
        self.manager.check_invariants()
        assert self._free(Tier.DEVICE) == DEVICE_PAGES
        assert self._free(Tier.HOST) == HOST_PAGES
        assert not self.manager.core.tree.roots

    # ---- inside ---------------------------------------------------------------------------------

    def _exchange(self, reports: list[Transferred]) -> None:
        for command in self.manager.step(reports):
            assert isinstance(command, Backup | Load)
            self.running.append(command)
        self._follow_events()
        for request in self.requests:
            self._check_shared_pages(request)

    def _follow_events(self) -> dict[str, list[Prefix]]:
        """Update the model; returns what was removed, by tier."""
        batch = self.manager.take_events()
        assert batch.lost == 0
        removed: dict[str, list[Prefix]] = {"device": [], "host": []}
        locked = self._locked_on_device()
        for event in batch.events:
            held = self.model.tiers[event.tier]
            for prefix in self.model.named(event.keys):
                if event.kind is EventKind.STORED:
                    assert prefix not in held
                    held.add(prefix)
                    continue
                assert prefix in held
                held.remove(prefix)
                removed[event.tier].append(prefix)
                if event.tier == "device":
                    assert prefix not in locked, "evicted under a lease"
                    self.page_of.pop(prefix, None)
        return removed

    def _locked_on_device(self) -> set[Prefix]:
        """Prefixes that live leases use on the device."""
        return {
            prefix
            for request in self.requests
            if request.lease.load_state is LoadState.IDLE
            for prefix in self.model.prefixes(request.tokens)[: request.lease.num_device]
        }

    def _drains(self, tail: Node) -> bool:
        """Is a page of a failed load still on the path, for somebody who counted on it?"""
        held = [node.held[Tier.DEVICE] for node in self.manager.core.tree.path(tail)]
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

    def _free(self, tier: Tier) -> int:
        return self.manager.core.allocators[tier].num_free


@pytest.mark.parametrize("kind", EvictionKind)
def test_tree_and_manager_agree_with_a_naive_model_c5_c6_c7_c8(kind: EvictionKind) -> None:
    machine = type(f"TreeAndManager{kind.name}", (TreeAndManager,), {"eviction": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=50, stateful_step_count=40))
