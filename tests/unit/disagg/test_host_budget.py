"""HostBudget: pages that several hand-overs share count once, whoever comes and goes."""

from __future__ import annotations

import random

import pytest

from quire.disagg.handover import AskedPrompt, Stage
from quire.disagg.host_budget import HostBudget, PageClaim
from quire.disagg.receiving import Receiver
from quire.keys import PrefixKey
from quire.peer.messages import Done, Skip
from support import PAGE, Rig, tokens_for
from unit.disagg.test_giving import LINK, Giving, computing
from unit.disagg.test_receiving import NoLinks

AGENTS = 64
PREFIX_PAGES = 100


def agents(rig: Rig) -> list[PrefixKey]:
    """Prompts that begin with the same pages, each with one page more of its own."""
    prefix = tokens_for(PREFIX_PAGES, seed=1)
    return [rig.key([*prefix, *([1000 + n] * PAGE)]) for n in range(AGENTS)]


def test_agents_with_one_long_prefix_are_let_in_together() -> None:
    rig = Rig(store=False, device=200, host=200)
    receiver = Receiver(rig.manager, NoLinks(), name="a", clock=lambda: rig.now, room=lambda: 200)
    handovers = []
    for number, key in enumerate(agents(rig)):
        prompt = AskedPrompt(key.tokens.tobytes())
        lease = rig.acquire(key)
        handovers.append(receiver.begin(f"r{number}", lease, prompt, ["tcp://p:1"], restore=False))
    receiver.advance()
    assert {handover.stage for handover in handovers} == {Stage.MOVING}
    assert receiver._budget.taken == (PREFIX_PAGES + AGENTS,)
    for handover in handovers:
        receiver.cancel(handover)
    assert receiver._budget.taken == (0,)


def test_one_of_another_prompt_still_waits_for_room() -> None:
    rig = Rig(store=False, device=200, host=200)
    receiver = Receiver(rig.manager, NoLinks(), name="a", clock=lambda: rig.now)
    keys = [*agents(rig), rig.doc(37, seed=9), rig.doc(36, seed=9)]
    handovers = []
    for number, key in enumerate(keys):
        prompt = AskedPrompt(key.tokens.tobytes())
        lease = rig.acquire(key)
        handovers.append(receiver.begin(f"r{number}", lease, prompt, ["tcp://p:1"], restore=False))
    receiver.advance()
    assert handovers[-2].stage is Stage.QUEUED
    receiver.cancel(handovers[0])
    receiver.advance()
    assert handovers[-2].stage is handovers[-1].stage is Stage.MOVING, (
        "one page, which it had alone"
    )


def test_agents_with_one_long_prefix_are_computed_together_and_given_back_exactly() -> None:
    giving = Giving(at_once=AGENTS, host=200)
    for number, key in enumerate(agents(giving.rig)):
        giving.giver.received(LINK, giving.ask(key, 0, name=f"a{number}"))
    giving.turn()
    assert len(computing(giving)) == AGENTS
    for number in range(AGENTS):
        if number % 2:
            giving.giver.received(LINK, Skip(f"a{number}", PREFIX_PAGES))
    assert giving.giver._budget.taken == (PREFIX_PAGES + AGENTS,), "the others still need them"
    for number in range(0, AGENTS, 2):
        giving.giver.received(LINK, Done(f"a{number}"))
    assert giving.giver._budget.taken == (AGENTS // 2,)
    for number in range(1, AGENTS, 2):
        giving.giver.received(LINK, Done(f"a{number}"))
    assert giving.giver._budget.taken == (0,)


def test_what_is_skipped_before_it_begins_is_never_taken() -> None:
    giving = Giving(at_once=2, host=20)
    first, second = giving.rig.doc(12, seed=1), giving.rig.doc(12, seed=2)
    giving.giver.received(LINK, giving.ask(first, 0, name="a"))
    giving.giver.received(LINK, giving.ask(second, 0, name="b"))
    giving.turn()
    assert computing(giving) == ["a"]
    giving.giver.received(LINK, Skip("b", 4))
    giving.turn()
    assert computing(giving) == ["a", "b"]
    assert giving.giver._budget.taken == (20,)
    giving.giver.received(LINK, Done("a"))
    assert giving.giver._budget.taken == (8,)


@pytest.mark.parametrize("mix", ["full", "full+window"])
@pytest.mark.parametrize("seed", range(30))
def test_whoever_comes_and_goes_what_is_taken_is_what_they_have_together(
    mix: str, seed: int
) -> None:
    rng = random.Random(seed)
    rig = Rig(mix=mix, store=False)
    budget, there = HostBudget(rig.manager), list[PageClaim]()
    pages = [bytes([page]) * 32 for page in range(40)]
    others = len(budget.taken) - 1
    for _ in range(200):
        action = rng.random()
        if action < 0.5 or not there:
            keys = set(rng.sample(pages, rng.randrange(20)))
            extra = rng.randrange(3)
            need = (len(keys) + extra, *(rng.randrange(4) for _ in range(others)))
            claim = PageClaim(need, set(keys))
            for _ in range(rng.randrange(3)):
                budget.has(claim)  # it may be looked at long before it is let in
            budget.take(claim)
            there.append(claim)
        elif action < 0.8:
            budget.give_back(there.pop(rng.randrange(len(there))))
        else:
            budget.give_some_back(rng.choice(there), set(rng.sample(pages, 5)))
        union = set[bytes]().union(*(claim.keys for claim in there))
        alone = sum(claim.need[0] - len(claim.keys) for claim in there)
        rest = (sum(claim.need[n] for claim in there) for n in range(1, others + 1))
        assert budget.taken == (len(union) + alone, *rest)
        probe = PageClaim((6, *(0 for _ in range(others))), set(rng.sample(pages, 6)))
        assert budget.more(probe)[0] == len(probe.keys - union)
