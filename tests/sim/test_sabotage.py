"""Negative controls: break the cache in different ways, and the simulator must notice.

Content checks are tested with the manager's own invariants switched off where those would notice
first: the two nets are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import quire.keys
import quire.manager.core
import quire.messages
import quire.sim.audit
import quire.sim.engine
import quire.sim.run
import quire.tree.tree
from quire.components import Component, Guard, Recurrent, SlidingWindow
from quire.config import WritePolicy
from quire.keys import Namespace, UnitKind
from quire.manager import CacheManager
from quire.manager.loads import Loader
from quire.manager.operations import Operation, OperationKind, Operations
from quire.manager.states import LeaseState, States, WorkingState
from quire.manager.upkeep import Upkeep
from quire.memory.allocator import PageAllocator
from quire.messages import Transferred
from quire.sim import ComponentMix, SimOptions, SimulationError, UnitMix, simulate
from quire.sim.compute import Compute
from quire.sim.engine import SimEngine, SimRequest
from quire.sim.store import SimStore
from quire.tree import Holding, Node, PrefixTree, Tenant, may_go, slot_of
from quire.types import NO_SLOT, PageKey, PageStatus, Residency, Tier

WRONG_BYTES = "uses a wrong page|holds something else"
OPTIONS = SimOptions(ranks=2, threshold_pages=1, fault_rate=0.1, stuck_share=0.0, admin_rate=0.05)
HYBRID = replace(OPTIONS, mix=ComponentMix.BOTH, snapshot_every=3)
Patch = pytest.MonkeyPatch


def assert_caught(match: str, options: SimOptions = OPTIONS) -> None:
    with pytest.raises(SimulationError, match=match):
        simulate_many(8, options)


def simulate_many(num_seeds: int, options: SimOptions) -> None:
    for seed in range(num_seeds):
        simulate(seed, 800, options)


def without_invariants(monkeypatch: Patch) -> None:
    monkeypatch.setattr(CacheManager, "check_invariants", lambda self: None)


@pytest.mark.parametrize("options", [OPTIONS, HYBRID], ids=["full", "hybrid"])
def test_the_same_runs_pass_without_sabotage(options: SimOptions) -> None:
    simulate_many(4, options)


@pytest.mark.parametrize("component", range(3), ids=["full", "window", "recurrent"])
def test_host_pages_ready_before_the_copy_landed_c9(monkeypatch: Patch, component: int) -> None:
    ready_at_once(monkeypatch, slot_of(component, Tier.HOST))
    assert_caught(WRONG_BYTES, HYBRID if component else OPTIONS)


@pytest.mark.parametrize("component", range(3), ids=["full", "window", "recurrent"])
def test_device_pages_ready_before_the_load_landed_c9(monkeypatch: Patch, component: int) -> None:
    ready_at_once(monkeypatch, slot_of(component, Tier.DEVICE))
    assert_caught(WRONG_BYTES, HYBRID if component else OPTIONS)


def ready_at_once(monkeypatch: Patch, hasty_slot: int) -> None:
    attach, make_ready = PrefixTree.attach, PrefixTree.make_ready

    def hasty(self: PrefixTree, node: Any, slot: int, pages: Any, state: Residency) -> Any:
        return attach(self, node, slot, pages, Residency.READY if slot == hasty_slot else state)

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
    wrong_keys = "goes by the keys of other pages"  # of a node that was cut while it was written
    noticed = f"{WRONG_BYTES}|{wrong_keys}|AssertionError"
    assert_caught_without_locks(monkeypatch, check=False, match=noticed)


def assert_caught_without_locks(monkeypatch: Patch, *, check: bool, match: str) -> None:
    if not check:
        without_invariants(monkeypatch)
    monkeypatch.setattr(PrefixTree, "lock", lambda self, tail, stop, slot: None)
    monkeypatch.setattr(PrefixTree, "unlock", lambda self, tail, stop, slot: [])
    assert_caught(match)


def test_eviction_that_ignores_locks_c7(monkeypatch: Patch) -> None:
    def careless(holding: Holding, slot: int) -> bool:
        reasons, holding.reasons = holding.reasons, 0
        allowed = may_go(holding, slot)
        holding.reasons = reasons
        return allowed

    monkeypatch.setattr(quire.manager.core, "may_go", careless)
    assert_caught("InvariantError")


def test_pages_that_are_never_freed_c6(monkeypatch: Patch) -> None:
    """Duplicates of what somebody else committed first are forgotten instead of freed."""
    insert = PrefixTree.insert

    def forgetful(self: PrefixTree, *args: Any, **options: Any) -> Any:
        return msgspec.structs.replace(insert(self, *args, **options), duplicate=b"")

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


@pytest.mark.parametrize("audited", [True, False], ids=["keys", "content"])
def test_page_keys_that_forget_the_prefix_c4(monkeypatch: Patch, audited: bool) -> None:
    """Equal pages after different prefixes then share one key in the store."""
    chain_keys = quire.keys.chain_keys

    def unchained(seed: bytes, tokens: bytes, step: int, width: int) -> bytes:
        pages = [tokens[at : at + width] for at in range(0, len(tokens) - width + 1, step)]
        return b"".join(chain_keys(b"", page, step, width) for page in pages)

    monkeypatch.setattr(quire.keys, "chain_keys", unchained)
    monkeypatch.setattr(quire.messages, "chain_keys", unchained)
    monkeypatch.setattr(quire.tree.tree, "chain_keys", unchained)
    if not audited:
        monkeypatch.setattr(quire.sim.audit, "chain_keys", unchained)
    assert_caught("goes by the keys of other pages" if audited else WRONG_BYTES)


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


# ---- windows and recurrent state: every component of a model at once -----------------------------


def test_a_request_that_works_on_the_snapshot_itself_c20(monkeypatch: Patch) -> None:
    """No copy on write: what the next one begins from is what this one has come to."""
    without_invariants(monkeypatch)
    begin = States.begin

    def shared(self: States, state: LeaseState, tenant: Tenant | None) -> bool:
        recurrent = state.recurrent
        if recurrent is None or recurrent.restore == NO_SLOT:
            return begin(self, state, tenant)
        recurrent.slot = recurrent.restore
        return True

    monkeypatch.setattr(States, "begin", shared)
    assert_caught(WRONG_BYTES, HYBRID)


def test_two_requests_that_work_on_one_slot_c20(monkeypatch: Patch) -> None:
    assert_caught_with_one_slot_for_all(monkeypatch, check=False, match=WRONG_BYTES)


def test_a_slot_with_two_owners_c20(monkeypatch: Patch) -> None:
    assert_caught_with_one_slot_for_all(monkeypatch, check=True, match="a page has two owners")


def assert_caught_with_one_slot_for_all(monkeypatch: Patch, *, check: bool, match: str) -> None:
    """Every request is given the slot that the first one of its cache got."""
    if not check:
        without_invariants(monkeypatch)
    begin = States.begin
    given: dict[States, int] = {}

    def shared(self: States, state: LeaseState, tenant: Tenant | None) -> bool:
        recurrent = state.recurrent
        if recurrent is None or recurrent.slot != NO_SLOT:
            return True
        if self in given:
            recurrent.slot = given[self]
            return True
        begun = begin(self, state, tenant)
        if begun:
            given[self] = recurrent.slot
        return begun

    monkeypatch.setattr(States, "begin", shared)
    assert_caught(match, HYBRID)


def test_a_snapshot_that_its_request_goes_on_writing_c20(monkeypatch: Patch) -> None:
    """The working slot is shared instead of the one that the state was saved into."""
    without_invariants(monkeypatch)
    publish = States._publish

    def hasty(self: States, recurrent: WorkingState, tail: Node) -> Node | None:
        saved = recurrent.saved_slot
        recurrent.saved_slot = recurrent.slot
        node = publish(self, recurrent, tail)
        if node is None:
            recurrent.saved_slot = saved
        return node

    monkeypatch.setattr(States, "_publish", hasty)
    assert_caught(WRONG_BYTES, HYBRID)


@pytest.mark.parametrize("pages_off", [-1, 1])
def test_a_snapshot_published_a_page_off_c19(monkeypatch: Patch, pages_off: int) -> None:
    saved = States.saved

    def off(self: States, state: LeaseState, page: int) -> None:
        saved(self, state, max(0, page + pages_off))

    monkeypatch.setattr(States, "saved", off)
    assert_caught(WRONG_BYTES, HYBRID)


def test_the_snapshot_of_another_request_c20(monkeypatch: Patch) -> None:
    """What two requests have saved is exchanged as it is shared."""
    without_invariants(monkeypatch)
    publish = States._publish
    waiting: dict[States, WorkingState] = {}

    def swapped(self: States, recurrent: WorkingState, tail: Node) -> Node | None:
        other = waiting.get(self)
        if other is not None and other is not recurrent and other.saved_slot != NO_SLOT:
            slots = recurrent.saved_slot, other.saved_slot
            other.saved_slot, recurrent.saved_slot = slots
        waiting[self] = recurrent
        return publish(self, recurrent, tail)

    monkeypatch.setattr(States, "_publish", swapped)
    assert_caught(WRONG_BYTES, HYBRID)


def test_a_request_that_begins_from_the_snapshot_before_c20(monkeypatch: Patch) -> None:
    """The tree is right, and what is taken from it is that of the request before."""
    enter = States.enter
    before: dict[States, int] = {}

    def stale(self: States, state: LeaseState, device_tail: Node) -> None:
        enter(self, state, device_tail)
        recurrent = state.recurrent
        if recurrent is not None and recurrent.restore != NO_SLOT:
            mine = recurrent.restore
            recurrent.restore = before.get(self, mine)
            before[self] = mine

    monkeypatch.setattr(States, "enter", stale)
    assert_caught("the state it", HYBRID)


def test_a_window_that_is_one_page_short_c19(monkeypatch: Patch) -> None:
    """Less is matched, locked and kept than a request reads."""
    construct = SlidingWindow.__init__

    def short(self: SlidingWindow, *args: Any) -> None:
        construct(self, *args)
        self.num_pages -= 1
        self.kept_pages = self.num_pages

    monkeypatch.setattr(SlidingWindow, "__init__", short)
    assert_caught("lacks pages of its window", HYBRID)


def test_window_pages_released_too_early_c23(monkeypatch: Patch) -> None:
    """Behind every point a page goes that who goes on there will read."""
    construct = SlidingWindow.__init__

    def short(self: SlidingWindow, *args: Any) -> None:
        construct(self, *args)
        self.kept_pages = self.num_pages - 1

    monkeypatch.setattr(SlidingWindow, "__init__", short)
    assert_caught("is dead weight", HYBRID)


def test_windows_that_are_never_released_c23(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Upkeep, "_release_windows", lambda self, node, window: [])
    assert_caught("has window pages nobody needs", HYBRID)


def test_a_match_that_ignores_the_snapshots_c19(monkeypatch: Patch) -> None:
    ignore(monkeypatch, Recurrent)
    assert_caught("AssertionError", HYBRID)


def test_a_match_that_ignores_the_window_c19(monkeypatch: Patch) -> None:
    ignore(monkeypatch, SlidingWindow)
    assert_caught("AssertionError", HYBRID)


def ignore(monkeypatch: Patch, component: type[Component]) -> None:
    def satisfied(
        self: Component, path: Sequence[Node], first: int, limit: int, *, host: bool
    ) -> int:
        return limit

    monkeypatch.setattr(component, "deepest", satisfied)


def test_a_request_that_begins_from_nothing_where_a_snapshot_is_missing_c19(
    monkeypatch: Patch,
) -> None:
    """As peers do: attention pages without the recurrent state that belongs to them."""
    without_invariants(monkeypatch)
    ignore(monkeypatch, Recurrent)
    monkeypatch.setattr(Recurrent, "needed", lambda self, tail: [])  # nothing to load either
    enter = States.enter

    def careless(self: States, state: LeaseState, device_tail: Node) -> None:
        slot = self._state_slot
        if device_tail.parent is not None and device_tail.held[slot] is None:
            recurrent, state.recurrent = state.recurrent, None
            enter(self, state, device_tail)
            state.recurrent = recurrent
        else:
            enter(self, state, device_tail)

    monkeypatch.setattr(States, "enter", careless)
    caught = []
    for seed in range(8):
        with pytest.raises(SimulationError) as broken:  # or loading it finds out before
            simulate(seed, 800, HYBRID)
        caught.append(str(broken.value))
    assert any("the state it" in each for each in caught)


@pytest.mark.parametrize("component", ["window", "recurrent"])
def test_a_fetch_published_although_a_leg_of_it_failed_c21(
    monkeypatch: Patch, component: str
) -> None:
    """Full pages decide alone: the window, or the snapshot, need not have arrived."""
    page_statuses = Operation.page_statuses

    def lenient(self: Operation) -> bytes:
        if self.kind is not OperationKind.FETCH:
            return page_statuses(self)
        legs = {leg: bytes(len(s)) if component in leg else s for leg, s in self.legs.items()}
        return page_statuses(msgspec.structs.replace(self, legs=legs))

    monkeypatch.setattr(Operation, "page_statuses", lenient)
    assert_caught(WRONG_BYTES, HYBRID)


def test_dead_weight_left_behind_c23(monkeypatch: Patch) -> None:
    """Full pages whose windows and snapshots are gone."""
    monkeypatch.setattr(Upkeep, "trim", lambda self, node: [])
    assert_caught("is dead weight", HYBRID)


@pytest.mark.parametrize("component", [SlidingWindow, Recurrent])
def test_guards_that_forget_a_component_c7(monkeypatch: Patch, component: type[Component]) -> None:
    """Somebody reads what is not locked: it goes, and is given to another."""

    def none(self: Component, tail: Node) -> list[Guard]:
        return []

    monkeypatch.setattr(component, "protection", none)
    assert_caught(WRONG_BYTES, HYBRID)


# ---- pairs and drafts ----------------------------------------------------------------------------

DRAFTS = replace(OPTIONS, units=UnitMix.BOTH, drafts=3)


def test_runs_with_drafts_pass_without_sabotage() -> None:
    simulate_many(4, DRAFTS)


def without_looking_at_content(monkeypatch: Patch) -> None:
    without_invariants(monkeypatch)
    monkeypatch.setattr(Compute, "_check", lambda *_: None)
    monkeypatch.setattr(quire.sim.run, "audit", lambda *_: 0)


def name_units_alike(monkeypatch: Patch) -> None:
    construct: Callable[[Namespace], None] = Namespace.__post_init__

    def alike(self: Namespace) -> None:
        construct(self)
        if self.unit is UnitKind.PAIR:
            object.__setattr__(self, "digest", replace(self, unit=UnitKind.TOKEN).digest)

    monkeypatch.setattr(Namespace, "__post_init__", alike)


def test_a_page_of_tokens_and_one_of_pairs_that_meet_in_the_tree_c3(monkeypatch: Patch) -> None:
    """Namespaces that differ in nothing but their units go by one name."""
    without_looking_at_content(monkeypatch)
    name_units_alike(monkeypatch)
    assert_caught("is of tokens and of pairs", DRAFTS)


def test_a_page_of_tokens_and_one_of_pairs_that_meet_in_the_store_c3(monkeypatch: Patch) -> None:
    without_looking_at_content(monkeypatch)
    put = SimStore.put

    def under_one_name(self: SimStore, name: Any, content: int, *_: Any) -> PageStatus:
        return put(self, (PageKey(bytes(32)), *name[1:]), content)

    monkeypatch.setattr(SimStore, "put", under_one_name)
    assert_caught("one key in the store is of tokens and of pairs", DRAFTS)


def test_rejected_tokens_taken_for_accepted_ones(monkeypatch: Patch) -> None:
    count = quire.sim.engine.full_pages
    monkeypatch.setattr(
        quire.sim.engine,
        "full_pages",
        lambda request, accepted: count(request, len(request.draft.tokens)),
    )
    assert_caught(WRONG_BYTES, DRAFTS)


def test_a_pair_whose_second_token_was_rejected_is_of_another_page(monkeypatch: Patch) -> None:
    """Counted as tokens are: the last pair of a page was computed with a token that is gone."""

    def as_tokens(request: SimRequest, accepted: int) -> int:
        return (len(request.tokens) + accepted) // request.key.namespace.page_size

    monkeypatch.setattr(quire.sim.engine, "full_pages", as_tokens)
    simulate_many(2, replace(DRAFTS, units=UnitMix.TOKEN))
    assert_caught(WRONG_BYTES, replace(DRAFTS, units=UnitMix.PAIR))
