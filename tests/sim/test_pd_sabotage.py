"""Negative controls: break the hand-over in different ways, and the simulated cluster must notice.

Where the manager's own invariants would notice first they are switched off: the nets are
independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.disagg.asking import Asking
from quire.disagg.giving import Giver
from quire.disagg.handover import Half, Handover, Stage
from quire.disagg.receiving import Receiver
from quire.engine.batch import Segment, SegmentResult
from quire.engine.holds import Holds
from quire.engine.request import Request, State
from quire.engine.sampling import Sampled
from quire.engine.segments import Segments
from quire.keys import PrefixKey, chain_keys
from quire.manager import CacheManager, Lease
from quire.manager.exports import Export, Exports, ReadablePages, _Wanted
from quire.manager.fetches.base import Intake
from quire.manager.fetches.intakes import Intakes
from quire.manager.operations import Operation, OpState
from quire.messages import PeerSource
from quire.peer.messages import Abort, Complete, Offer, Refused, Repair
from quire.sim import ComponentMix, SimulationError, UnitMix
from quire.sim.pd.model import SimModel
from quire.sim.pd.options import SimPdOptions, Topology
from quire.sim.pd.run import simulate_pd
from quire.sim.peers import _Grant
from quire.tree import Node
from quire.types import PageStatus
from sim.test_sabotage import name_units_alike

WRONG_BYTES = "uses a wrong page|holds something else"
CRAMPED = SimPdOptions(
    prefills=1,
    decodes=2,
    device_pages=26,
    host_pages=24,
    concurrency=6,
    timeout_s=1.0,
    fault_rate=0.03,
    slow_share=0.05,
    abort_rate=0.03,
    cut_rate=0.01,
    evict_rate=0.02,
    duplicated=0.1,
)
HYBRID = replace(CRAMPED, mix=ComponentMix.BOTH, host_windows=16, host_slots=8, device_windows=40)
LATE = replace(
    CRAMPED,
    decodes=3,
    page_size=2,
    host_pages=16,
    concurrency=12,
    timeout_s=8.0,
    fault_rate=0.0,
    slow_share=0.3,
    cut_rate=0.05,
    evict_rate=0.95,
)
"""Lines are cut, which one end notices long before the other, and pages do not stay for long."""
Patch = pytest.MonkeyPatch


def assert_caught(match: str, options: SimPdOptions = CRAMPED, steps: int = 800) -> None:
    with pytest.raises(SimulationError, match=match):
        simulate_many(24, options, steps)


def simulate_many(seeds: int, options: SimPdOptions, steps: int = 800) -> None:
    for seed in range(seeds):
        simulate_pd(seed, steps, options)


def without_invariants(monkeypatch: Patch) -> None:
    monkeypatch.setattr(CacheManager, "check_invariants", lambda self: None)


@pytest.mark.parametrize("options", [CRAMPED, HYBRID], ids=["full", "hybrid"])
def test_the_same_runs_pass_without_sabotage(options: SimPdOptions) -> None:
    simulate_many(3, options)


def nothing_granted_is_locked(monkeypatch: Patch) -> None:
    original = Exports._advance

    def advance(self: Exports, export: Export, wanted: _Wanted, tail: Node) -> list[ReadablePages]:
        granted = original(self, export, wanted, tail)
        for grant in granted:
            self._core.unprotect(self._core.operations.running[grant.op].guards)
        return granted

    monkeypatch.setattr(Exports, "_advance", advance)


def test_what_is_granted_is_not_locked(monkeypatch: Patch) -> None:
    nothing_granted_is_locked(monkeypatch)
    assert_caught(WRONG_BYTES)


def readers_are_slow(monkeypatch: Patch) -> None:
    """They read at the last moment, all at once, and are not disturbed by what the leaders' lines
    are."""
    monkeypatch.setattr("quire.sim.reads._THREADS", 100)
    monkeypatch.setattr("quire.sim.reads.moments", lambda rng, whole_s: (whole_s, whole_s))
    monkeypatch.setattr("quire.sim.network._SAME_FOR_PAGES", 0.0)


def test_slow_readers_alone_do_no_harm(monkeypatch: Patch) -> None:
    readers_are_slow(monkeypatch)
    simulate_many(2, LATE, 2_000)


def test_a_grant_ends_before_its_last_reader_has_left(monkeypatch: Patch) -> None:
    def gone(self: _Grant) -> None:
        if self.on_free is not None:
            on_free, self.on_free = self.on_free, None
            on_free(self.rank, self.op, self.component, len(self.pages))

    monkeypatch.setattr(_Grant, "gone", gone)
    readers_are_slow(monkeypatch)
    assert_caught(WRONG_BYTES, LATE, 2_000)


def test_a_grant_is_closed_without_waiting_for_the_workers(monkeypatch: Patch) -> None:
    """The pages of a grant are let go of when it is cancelled, not when it has ended."""
    original = Exports.close

    def close(self: Exports, export: Export) -> None:
        for op in export.grants:
            if (running := self._core.operations.running.get(op)) is not None:
                self._core.unprotect(running.guards)
                running.guards = []
        original(self, export)

    monkeypatch.setattr(Exports, "close", close)
    readers_are_slow(monkeypatch)
    assert_caught(WRONG_BYTES, LATE, 2_000)


def test_a_page_that_did_not_come_is_taken_for_one_that_did(monkeypatch: Patch) -> None:
    original = Operation.page_statuses

    def page_statuses(self: Operation) -> bytes:
        return bytes(PageStatus.OK if s == PageStatus.CORRUPT else s for s in original(self))

    monkeypatch.setattr(Operation, "page_statuses", page_statuses)
    assert_caught(WRONG_BYTES, replace(CRAMPED, fault_rate=0.2))


def test_pages_are_taken_in_when_the_first_rank_has_them(monkeypatch: Patch) -> None:
    original = Intakes._reported

    def reported(self: Intakes, op: Operation) -> None:
        if op.state is OpState.RUNNING and len(op.open_legs) < len(op.legs):
            intake = self._by_op[op.id]
            op.legs = {leg: bytes(len(statuses)) for leg, statuses in op.legs.items()}
            self._unload(intake, op, intake.coming[op.id], final=False)
            self.fresh[intake] = None
        original(self, op)

    monkeypatch.setattr(Intakes, "_reported", reported)
    without_invariants(monkeypatch)
    assert_caught(WRONG_BYTES, replace(CRAMPED, decode_ranks=2, fault_rate=0.0))


def test_state_is_published_before_the_prefix_is_complete(monkeypatch: Patch) -> None:
    """A later page is put where the first that is missing belongs."""
    original = Intakes.reach

    def reach(self: Intakes, intake: Intake, limit: int | None = None) -> int:
        first, here = intake.first, intake.here[0]
        if first not in here and first + 1 in here:
            here[first] = here.pop(first + 1)
        return original(self, intake, limit)

    monkeypatch.setattr(Intakes, "reach", reach)
    assert_caught(WRONG_BYTES, replace(CRAMPED, fault_rate=0.1))


def test_an_offer_of_another_hand_over_is_taken(monkeypatch: Patch) -> None:
    original = Receiver.received

    def received(self: Receiver, link: str, message: Offer | Complete | Refused) -> None:
        if isinstance(message, Offer):
            for handover in self.open:
                current = handover.current
                if current is not None and current.link == link:
                    self._asking.offered(handover, current, message)
                    return
        original(self, link, message)

    monkeypatch.setattr(Receiver, "received", received)
    assert_caught(WRONG_BYTES)


@pytest.mark.parametrize("component", ["window", "recurrent"])
def test_the_state_of_another_point_is_offered(monkeypatch: Patch, component: str) -> None:
    original = Exports._advance

    def advance(self: Exports, export: Export, wanted: _Wanted, tail: Node) -> list[ReadablePages]:
        if wanted.component.name != component or wanted.next == 0:
            return original(self, export, wanted, tail)
        before = _Wanted(wanted.component, wanted.next - 1, wanted.end - 1)
        found = original(self, export, before, tail)
        wanted.next = before.next + 1
        return [replace(grant, first=grant.first + 1) for grant in found]

    monkeypatch.setattr(Exports, "_advance", advance)
    assert_caught(WRONG_BYTES, HYBRID)


def test_state_is_offered_before_the_end_is_reached(monkeypatch: Patch) -> None:
    """A snapshot of wherever the prefix has come to, as that of its end."""

    def advance(self: Exports, export: Export, wanted: _Wanted, tail: Node) -> list[ReadablePages]:
        if wanted.component.is_point and tail.end < wanted.end:
            early = _Wanted(wanted.component, tail.end - 1, tail.end)
            found = original(self, export, early, tail) if tail.end else []
            if found:
                wanted.next = wanted.end
            return [replace(grant, first=wanted.end - 1) for grant in found]
        return original(self, export, wanted, tail)

    def grant_all(self: Exports, export: Export, lease: Lease) -> list[ReadablePages]:
        grants = [g for wanted in export.wanted for g in self._advance(export, wanted, lease.tail)]
        export.wanted = [wanted for wanted in export.wanted if wanted.next < wanted.end]
        return grants

    original = Exports._advance
    monkeypatch.setattr(Exports, "_advance", advance)
    monkeypatch.setattr(Exports, "grant", grant_all)
    options = replace(HYBRID, mix=ComponentMix.RECURRENT, chunk_pages=1)
    assert_caught(WRONG_BYTES, options)


def test_an_abort_is_forgotten(monkeypatch: Patch) -> None:
    ignore(monkeypatch, Giver, Abort)
    assert_caught(
        "for nobody|could do it", replace(CRAMPED, abort_rate=0.1, timeout_s=3.0, cut_rate=0.0)
    )


def test_a_repair_is_ignored(monkeypatch: Patch) -> None:
    """Then somebody is waited for in vain, although nobody is slow."""
    options = replace(
        CRAMPED, host_pages=200, slow_share=0.0, cut_rate=0.0, fault_rate=0.05, concurrency=3
    )
    given_up: list[str] = []
    original = Asking.give_up

    def give_up(self: Asking, handover: Handover, reason: str, why: str) -> None:
        given_up.append(why)
        original(self, handover, reason, why)

    monkeypatch.setattr(Asking, "give_up", give_up)
    simulate_many(2, options)
    assert not [why for why in given_up if "nothing for" in why]
    ignore(monkeypatch, Giver, Repair)
    simulate_many(2, options)
    assert [why for why in given_up if "nothing for" in why]


def ignore(monkeypatch: Patch, kind: type, message_kind: type) -> None:
    original: Callable[..., None] = kind.received  # type: ignore[attr-defined]

    def received(self: object, link: str, message: object) -> None:
        if not isinstance(message, message_kind):
            original(self, link, message)

    monkeypatch.setattr(kind, "received", received)


def test_a_shortfall_of_the_restore_is_not_noticed(monkeypatch: Patch) -> None:
    original = Receiver._follow

    def follow(self: Receiver, handover: Handover, now: float) -> None:
        original(self, handover, now)
        if handover.restore is Half.FAILED and handover.stage is Stage.MOVING:
            handover.least = handover.lease.tail.end  # else it is noticed when it is admitted
            self._arrived(handover)

    monkeypatch.setattr(Receiver, "_follow", follow)
    assert_caught("others should have computed", replace(CRAMPED, forget_rate=0.3))


def test_a_piece_of_an_offer_is_read_from_its_beginning(monkeypatch: Patch) -> None:
    """Some of what is offered is there already, or there is room for a part of it only."""

    def replace_nothing(source: PeerSource, first: int) -> PeerSource:
        return source

    structs = SimpleNamespace(structs=SimpleNamespace(replace=replace_nothing))
    monkeypatch.setattr("quire.manager.fetches.offers.msgspec", structs)
    assert_caught(WRONG_BYTES, replace(CRAMPED, fault_rate=0.2, chunk_pages=8))


def test_between_unified_engines_too(monkeypatch: Patch) -> None:
    """Pages of one prefix offered as those of another."""
    nothing_granted_is_locked(monkeypatch)
    options = replace(CRAMPED, topology=Topology.PEERS, prefills=0, decodes=3, slow_share=0.2)
    assert_caught(WRONG_BYTES, replace(options, host_pages=16))


DRAFTS = replace(CRAMPED, drafts=3)


def test_runs_with_drafts_pass_without_sabotage() -> None:
    simulate_many(2, DRAFTS)


def test_pages_of_rejected_tokens_shared_as_if_they_counted(monkeypatch: Patch) -> None:
    """What was proposed is computed, and so are its pages; most of it is thrown away."""
    share = Holds.share

    def hasty(self: Holds, request: Request) -> None:
        """Before what was drawn behind the proposals is known."""
        request.computed += 2
        if request.computed <= request.length:
            share(self, request)
        request.computed -= 2

    monkeypatch.setattr(Holds, "share", hasty)
    assert_caught(WRONG_BYTES, DRAFTS)


def test_proposals_taken_for_answers(monkeypatch: Patch) -> None:
    def gullible(segment: Segment, drawn: Sequence[Sampled]) -> SegmentResult:
        return SegmentResult(drawn[0], list(drawn[1:]))

    monkeypatch.setattr("quire.sim.pd.model.verified", gullible)
    assert_caught("answered|uses a wrong page", DRAFTS)


PAIRS = replace(DRAFTS, units=UnitMix.PAIR)
TWO_KINDS = replace(CRAMPED, units=UnitMix.BOTH, host_pages=40)


@pytest.mark.parametrize("options", [PAIRS, TWO_KINDS], ids=["pairs", "both"])
def test_runs_with_pairs_pass_without_sabotage(options: SimPdOptions) -> None:
    simulate_many(2, options, 500)


def test_engines_of_tokens_and_of_pairs_that_meet_in_a_store_c3(monkeypatch: Patch) -> None:
    """They have one model and one store, and their pages go by the same names."""
    without_invariants(monkeypatch)
    monkeypatch.setattr(SimModel, "_check", lambda *_: None)
    monkeypatch.setattr("quire.sim.pd.sim_node.audit", lambda *_: 0)
    name_units_alike(monkeypatch)
    monkeypatch.setattr("quire.keys.chain_keys", without_overlap)
    monkeypatch.setattr("quire.messages.chain_keys", without_overlap)
    monkeypatch.setattr("quire.tree.tree.chain_keys", without_overlap)
    assert_caught("one key in the store is of tokens and of pairs", TWO_KINDS)


def without_overlap(seed: bytes, tokens: bytes, page_bytes: int, page_width: int) -> bytes:
    return chain_keys(seed, tokens[: len(tokens) - page_width + page_bytes], page_bytes, page_bytes)


def test_a_chunk_that_does_not_know_the_token_after_it(monkeypatch: Patch) -> None:
    with_ahead = Segments.with_ahead

    def ignorant(self: Segments, *arguments: Any) -> Segment:
        return msgspec.structs.replace(with_ahead(self, *arguments), after=-1)

    monkeypatch.setattr(Segments, "with_ahead", ignorant)
    assert_caught(f"a pair of which it knows one token|{WRONG_BYTES}", PAIRS)


def test_a_page_of_pairs_shared_before_its_last_token_is_known(monkeypatch: Patch) -> None:
    """Named by the tokens that were proposed, of which the model then says others."""
    key_of = Request.key_of

    def hasty(self: Request, count: int) -> PrefixKey:
        key = key_of(self, count)
        if self.state is State.RUNNING and not self.for_peer and self.num_output:
            return PrefixKey(key.namespace, [*self.tokens[:count].tolist(), 0])
        return key

    monkeypatch.setattr(Request, "key_of", hasty)
    assert_caught(f"{WRONG_BYTES}|LeaseError", PAIRS)
