"""Negative controls: break the cache in different ways, and the simulator must notice.

Content checks are tested with the manager's own invariants switched off where those would notice
first: the two nets are independent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import quire.keys
import quire.tree.tree
from quire.components import FullAttention
from quire.config import WritePolicy
from quire.eviction.base import Evictable
from quire.keys import Namespace
from quire.manager import CacheManager
from quire.manager.loads import Loader
from quire.manager.operations import Operation, Operations
from quire.memory.allocator import PageAllocator
from quire.messages import Transferred
from quire.sim import SimOptions, SimulationError, simulate
from quire.sim.engine import SimEngine
from quire.tree import Holding, PrefixTree
from quire.types import Residency, Tier

WRONG_BYTES = "uses a wrong page|holds something else"
OPTIONS = SimOptions(ranks=2, threshold_pages=1, fault_rate=0.1, stuck_share=0.0, admin_rate=0.05)
Patch = pytest.MonkeyPatch


def assert_caught(match: str, options: SimOptions = OPTIONS) -> None:
    with pytest.raises(SimulationError, match=match):
        simulate_many(8, options)


def simulate_many(num_seeds: int, options: SimOptions) -> None:
    for seed in range(num_seeds):
        simulate(seed, 800, options)


def without_invariants(monkeypatch: Patch) -> None:
    monkeypatch.setattr(CacheManager, "check_invariants", lambda self: None)


def test_the_same_runs_pass_without_sabotage() -> None:
    simulate_many(4, OPTIONS)


def test_host_pages_ready_before_the_copy_landed_c9(monkeypatch: Patch) -> None:
    ready_at_once(monkeypatch, Tier.HOST)
    assert_caught(WRONG_BYTES)


def test_device_pages_ready_before_the_load_landed_c9(monkeypatch: Patch) -> None:
    ready_at_once(monkeypatch, Tier.DEVICE)
    assert_caught(WRONG_BYTES)


def ready_at_once(monkeypatch: Patch, tier: Tier) -> None:
    attach, make_ready = PrefixTree.attach, PrefixTree.make_ready

    def hasty(self: PrefixTree, node: Any, slot: int, pages: Any, state: Residency) -> Any:
        return attach(self, node, slot, pages, Residency.READY if slot == tier else state)

    def tolerant(self: PrefixTree, node: Any, slot: int) -> None:
        if node.held[slot].state is Residency.FILLING:
            make_ready(self, node, slot)

    monkeypatch.setattr(PrefixTree, "attach", hasty)
    monkeypatch.setattr(PrefixTree, "make_ready", tolerant)


def test_failed_pages_taken_for_good_ones_c17(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Operation, "agreed_pages", lambda self: self.num_pages)
    assert_caught(WRONG_BYTES)


def test_the_longest_rank_instead_of_the_shortest_c24(monkeypatch: Patch) -> None:
    def longest(self: Operation) -> int:
        return max(len(s) - len(s.lstrip(b"\0")) for s in self.legs.values())

    monkeypatch.setattr(Operation, "agreed_pages", longest)
    assert_caught(WRONG_BYTES)


def test_an_operation_ended_by_its_first_progress_report(monkeypatch: Patch) -> None:
    """Pages are freed and reused while a worker still fills them."""
    without_invariants(monkeypatch)
    transferred = Operations.transferred

    def hasty(self: Operations, report: Transferred) -> bool:
        done = Transferred(
            report.op, report.rank, report.component, report.first, report.statuses, True
        )
        return transferred(self, done)

    monkeypatch.setattr(Operations, "transferred", hasty)
    assert_caught(WRONG_BYTES)


def test_locks_that_protect_nothing_c7(monkeypatch: Patch) -> None:
    assert_caught_without_locks(monkeypatch, check=True, match="locks are miscounted")


def test_pages_evicted_under_a_request_are_seen_by_their_content_c7(monkeypatch: Patch) -> None:
    assert_caught_without_locks(monkeypatch, check=False, match=WRONG_BYTES)


def assert_caught_without_locks(monkeypatch: Patch, *, check: bool, match: str) -> None:
    if not check:
        without_invariants(monkeypatch)
    monkeypatch.setattr(PrefixTree, "lock", lambda self, tail, stop, slot: None)
    monkeypatch.setattr(PrefixTree, "unlock", lambda self, tail, stop, slot: [])
    assert_caught(match)


def test_eviction_that_ignores_locks_c7(monkeypatch: Patch) -> None:
    evictable = FullAttention.evictable

    def careless(self: FullAttention, tier: Tier) -> Evictable:
        rule = evictable(self, tier)

        def check(holding: Holding) -> bool:
            locks, holding.locks = holding.locks, 0
            allowed = rule(holding)
            holding.locks = locks
            return allowed

        return check

    monkeypatch.setattr(FullAttention, "evictable", careless)
    assert_caught("InvariantError")


def test_pages_that_are_never_freed_c6(monkeypatch: Patch) -> None:
    """Duplicates of what somebody else committed first are forgotten instead of freed."""
    insert = PrefixTree.insert

    def forgetful(self: PrefixTree, *args: Any) -> Any:
        return insert(self, *args)._replace(duplicate=b"")

    monkeypatch.setattr(PrefixTree, "insert", forgetful)
    assert_caught("pages accounted")


def test_pages_freed_twice(monkeypatch: Patch) -> None:
    free = PageAllocator.free

    def eager(self: PageAllocator, pages: Any) -> None:
        free(self, pages)
        if len(pages) == 8:
            free(self, pages)

    monkeypatch.setattr(PageAllocator, "free", eager)
    assert_caught("InvariantError")


def test_page_keys_that_forget_the_prefix_c4(monkeypatch: Patch) -> None:
    """Equal pages after different prefixes then share one key in the store."""
    chain_keys = quire.keys.chain_keys

    def unchained(seed: bytes, tokens: bytes, step: int, width: int) -> bytes:
        pages = [tokens[at : at + width] for at in range(0, len(tokens) - width + 1, step)]
        return b"".join(chain_keys(b"", page, step, width) for page in pages)

    monkeypatch.setattr(quire.keys, "chain_keys", unchained)
    monkeypatch.setattr(quire.tree.tree, "chain_keys", unchained)
    assert_caught(WRONG_BYTES)


def test_namespaces_that_share_a_digest_c3(monkeypatch: Patch) -> None:
    construct: Callable[[Namespace], None] = Namespace.__post_init__

    def alike(self: Namespace) -> None:
        construct(self)
        object.__setattr__(self, "digest", b"same for everybody".ljust(32))

    monkeypatch.setattr(Namespace, "__post_init__", alike)
    assert_caught(WRONG_BYTES)


def test_a_request_that_does_not_wait_for_its_load_c11(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Loader, "_wait", lambda self, lease, span: None)
    assert_caught(WRONG_BYTES)


def test_an_engine_that_computes_the_wrong_bytes(monkeypatch: Patch) -> None:
    """The oracle itself can say no."""
    compute = SimEngine._compute

    def sloppy(self: SimEngine, request: Any) -> None:
        right = request.expected
        request.expected = [content + 1 for content in right]
        compute(self, request)
        request.expected = right

    monkeypatch.setattr(SimEngine, "_compute", sloppy)
    assert_caught(WRONG_BYTES)


def test_a_lease_that_is_never_released(monkeypatch: Patch) -> None:
    release = CacheManager.release

    def forgetful(self: CacheManager, lease: Any) -> None:
        if lease.owner != "r9":
            release(self, lease)

    monkeypatch.setattr(CacheManager, "release", forgetful)
    assert_caught("leases are left")


def test_a_load_report_that_is_lost_for_ever_is_a_hang(monkeypatch: Patch) -> None:
    transferred = Operations.transferred

    def deaf(self: Operations, report: Transferred) -> bool:
        return report.op % 13 == 0 or transferred(self, report)

    monkeypatch.setattr(Operations, "transferred", deaf)
    assert_caught("never came to rest")


def test_a_tree_that_calls_everything_written_through_ready(monkeypatch: Patch) -> None:
    """As the first sabotage, for the policy that copies out under pressure."""
    ready_at_once(monkeypatch, Tier.HOST)
    assert_caught(
        WRONG_BYTES, SimOptions(write_policy=WritePolicy.WRITE_BACK, device_pages=26, ranks=1)
    )
