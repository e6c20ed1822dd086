"""What is done with a model and its cache, for any model: every answer must be the oracle's.

Each scenario also asserts that what it is about has happened: that a prefix came from the tier it
was to come from, that requests were preempted. An engine without a cache would answer rightly too.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from e2e.exactness.oracle import Answer, differences, reference
from e2e.exactness.rig import EngineRig, engine_rig
from e2e.exactness.subjects import PAGE, Prompt, Subject
from quire.config import PrefetchPolicy, WritePolicy
from quire.types import Tier

WAIT: dict[str, Any] = {"prefetch_policy": PrefetchPolicy.WAIT_COMPLETE, "prefetch_threshold": PAGE}
"""What the store has is used, however long that takes."""


def check(subject: Subject, prompts: Sequence[Prompt], answers: list[Answer], what: str) -> None:
    noise = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        noise += differences(reference(subject, prompt, len(answer.tokens)), answer)
    print(f"{subject}, {what}: {len(answers)} answers, {noise} differ by fp32 noise")


def ask(
    subject: Subject, rig: EngineRig, prompts: Sequence[Prompt], what: str, *, stagger: int = 0
) -> list[Answer]:
    answers = rig.answer(prompts, subject.num_tokens, stagger=stagger)
    check(subject, prompts, answers, what)
    return answers


def every_tier(subject: Subject, store: str) -> None:
    """Cold = device = host = store = store after a restart; one of the prompts is whole pages, all
    of which are found."""
    shortest = min(subject.ask(), key=len)
    prompts = [*subject.ask(), shortest[: len(shortest) // PAGE * PAGE]]
    total = sum(map(len, prompts))
    with engine_rig(subject, store=store, **WAIT) as rig:
        for prompt in prompts:
            ask(subject, rig, [prompt], "cold, one by one")
        ask(subject, rig, prompts, "device")
        assert rig.reused("device") > 0.8 * total

        rig.flush(Tier.DEVICE)
        ask(subject, rig, prompts, "host")
        assert rig.reused("host") > 0.5 * total

        rig.flush(Tier.DEVICE, Tier.HOST)
        ask(subject, rig, prompts, "store")
        assert rig.reused("store") > 0.5 * total
        rig.settle()

    with engine_rig(subject, store=store, **WAIT) as rig:
        ask(subject, rig, prompts, "store, after a restart")
        assert rig.reused("store") > 0.5 * total
        assert rig.reused("device", "host") < 0.5 * total


def two_ranks(subject: Subject, store: str) -> None:
    """Heads on two processes: cold = host = store."""
    prompts = subject.ask()
    with engine_rig(subject, tp=2, store=store, **WAIT) as rig:
        ask(subject, rig, prompts, "two ranks, cold")
        rig.flush(Tier.DEVICE)
        ask(subject, rig, prompts, "two ranks, host")
        assert rig.reused("host") > 0
        rig.flush(Tier.DEVICE, Tier.HOST)
        ask(subject, rig, prompts, "two ranks, store")
        assert rig.reused("store") > 0
        rig.until(lambda: rig.engine.status().store.counters.get("read:ok", 0) > 0)
        assert all(health.answers for health in rig.engine.status().store.stores)


def chunks_and_mixed_batches(subject: Subject, prompts: list[Prompt], chunk_tokens: int) -> None:
    """Staggered arrivals: prompts and answers are computed in the same batches."""
    with engine_rig(subject, chunk_tokens=chunk_tokens) as rig:
        ask(subject, rig, prompts, f"cold, chunks of {chunk_tokens}", stagger=3)
        ask(subject, rig, prompts[::-1], f"device, chunks of {chunk_tokens}")
        assert rig.reused("device") > 0


def preemption(subject: Subject, prompts: list[Prompt], num_tokens: int) -> None:
    """The requests fit when they are admitted, and no longer when they have grown."""
    pages = sum(len(prompt) // PAGE + 1 for prompt in prompts)
    with engine_rig(
        subject, device_pages=pages, host_pages=4 * pages, snapshots=2 * len(prompts) + 2
    ) as rig:
        grown = rig.answer(prompts, num_tokens)
        assert rig.counter("requests_preempted") > 0
    check(subject, prompts, grown, "preempted")


def eviction(subject: Subject, store: str, policy: WritePolicy) -> None:
    """The device holds less than the requests need together: they take turns."""
    prompts = subject.ask()
    longest = max(map(len, prompts)) + subject.num_tokens
    with engine_rig(
        subject,
        device_pages=longest // PAGE + 4,
        host_pages=96,
        store=store,
        chunk_tokens=64,
        write_policy=policy,
        prefetch_threshold=32,
    ) as rig:
        for turn in range(2):
            ask(subject, rig, prompts, f"{policy.value}, turn {turn}", stagger=turn)
        assert rig.counter("evicted_device_pages") > 0


def wrong_pages(subject: Subject, prompt: Prompt) -> None:
    """A negative control: with the heads of the cached pages swapped, the answer must change."""
    with engine_rig(subject, host_pages=0) as rig:
        rig.answer([prompt], subject.num_tokens)
        pool = rig.engine._executor._rank.worker.components["full"].device  # type: ignore[attr-defined]
        for layer in range(pool.layout.num_layers):
            for plane in pool.planes(layer):
                plane.copy_(plane.flip(2))
        (answer,) = rig.answer([prompt], subject.num_tokens)
        assert rig.reused("device") > 0
    with pytest.raises(AssertionError, match="gap"):
        differences(reference(subject, prompt), answer)


def conversation(subject: Subject, store: str, num_turns: int) -> None:
    """Each turn goes on from the last one, its answer included, from another tier each time."""
    forgotten = [(), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)]
    prompt, ended = subject.cut(0, subject.length), 0
    with engine_rig(subject, store=store, **WAIT) as rig:
        for turn in range(num_turns):
            (answer,) = ask(subject, rig, [prompt], f"turn {turn}")
            assert rig.reused() >= ended, f"{rig.cached} of {ended}"
            # The last token of an answer is never computed: the pages before it are there.
            ended = (len(prompt) + len(answer.tokens) - 1) // PAGE * PAGE
            prompt = [*prompt, *answer.tokens, *subject.cut(subject.length + 40 * turn, 37)]
            rig.flush(*forgotten[turn % len(forgotten)])


def branches(subject: Subject) -> None:
    """Prompts that leave a known one before, at and after the snapshot at its end.

    known    [ page 0 ··· half ······ end )  rest of a page, answer
    before   [ ········ half )[ own
    at       [ ················ end )[ own
    inside   [ ················ end ) ··[ own
    after    [ ················ end ) rest, part of the answer [ own
    """
    known = subject.cut(0, subject.length)
    end = len(known) // PAGE * PAGE
    half = end // 2 // PAGE * PAGE
    own = [subject.cut(subject.length + 50 * i, 21) for i in range(9)]
    with engine_rig(subject) as rig:
        (answer,) = ask(subject, rig, [known], "to branch from")
        said = known + answer.tokens[: subject.num_tokens // 2]

        ask(subject, rig, [known[:half] + own[0]], "before")
        # The one before went past this point and left behind what is needed to branch there.
        ask(subject, rig, [known[:half] + own[1]], "before, once more")
        assert rig.reused() >= half
        for what, prompt in (("at", known[:end] + own[2]), ("after", said + own[3])):
            ask(subject, rig, [prompt], what)
            assert rig.reused() >= end, f"{what}: {rig.cached} of {end}"
        # Two go on from one snapshot in the same batches: neither may see the other's state.
        both = [known + own[4], said + own[3]]
        ask(subject, rig, both, "together")
        ask(subject, rig, both, "together, once more", stagger=2)
        if subject.is_quick:
            ask(subject, rig, [known[: end + 2] + own[5]], "inside")
            assert rig.reused() >= end
            ask(subject, rig, [known[: half + 3] + own[6], known[: half - 3] + own[7]], "around")
            ask(subject, rig, [known[:end], known[: end + 1], known[: end - 1]], "cut short")


def eviction_of(subject: Subject, component: str, store: str) -> None:
    """One kind of state is gone from a tier, the others are still there."""
    prompts = subject.two()
    with engine_rig(subject, store=store, **WAIT) as rig:
        ask(subject, rig, prompts, "cold")
        for tiers in ([Tier.DEVICE], [Tier.HOST], [Tier.DEVICE, Tier.HOST]):
            names = " and ".join(tier.name.lower() for tier in tiers)
            assert rig.evict(component, *tiers) > 0, f"no {component} on {names}"
            ask(subject, rig, prompts, f"{component} gone from {names}")
            assert rig.reused() > 0, f"{component} gone from {names}: {rig.cached}"
            rig.settle()


def more_than_the_host_holds(subject: Subject, store: str) -> None:
    """The store has it all, the host has no room for it: it comes through the host in parts, and
    each part ends where all state is."""
    length = 2 * subject.length
    whole = subject.cut(0, length)
    steps = [length // 6, length // 3, length]
    with engine_rig(subject, store=store, **WAIT) as rig:
        for count in steps:
            ask(subject, rig, [whole[:count]], f"{count} tokens")
        rig.settle()
    # Half of the host may be on its way from the store: more than a third of the prefix.
    host_pages = int(0.9 * length / PAGE)
    with engine_rig(subject, store=store, host_pages=host_pages, snapshots=6, **WAIT) as rig:
        for turn in range(2):
            ask(subject, rig, [whole], f"in parts, turn {turn}")
            assert rig.reused("store") == (length - 1) // PAGE * PAGE, rig.cached
            rig.flush(Tier.DEVICE, Tier.HOST)
