"""C32 on a real model and real prompts: the same greedy tokens, wherever the prefix came from."""

from pathlib import Path

import msgspec
import pytest

from e2e.exactness import scenarios
from e2e.exactness.oracle import Answer, differences, references
from e2e.exactness.rig import WHOLE, EngineRig, engine_rig
from e2e.exactness.subjects import SMOLLM2, TINY_LLAMA, Subject
from quire.config import WritePolicy
from quire.manager import Way
from quire.types import Tier

PROMPTS = SMOLLM2.ask()
NUM_TOKENS = SMOLLM2.num_tokens


def ask(rig: EngineRig, what: str) -> list[Answer]:
    return scenarios.ask(SMOLLM2, rig, PROMPTS, what)


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def test_every_tier_gives_the_same_tokens_c32(store: str) -> None:
    scenarios.every_tier(SMOLLM2, store)


def test_what_was_generated_is_reused_by_the_next_turn_c32() -> None:
    with engine_rig() as rig:
        first = rig.answer(PROMPTS, NUM_TOKENS)
        longer = [p + answer.tokens for p, answer in zip(PROMPTS, first, strict=True)]
        warm = rig.answer(longer, NUM_TOKENS)
        # The last token of an answer is never computed: at least the pages before it are there.
        assert rig.reused("device") >= sum((len(p) - 1) // 16 * 16 for p in longer)
    with engine_rig(host_pages=0) as rig:
        assert tokens_of(rig.answer(longer, NUM_TOKENS)) == tokens_of(warm)


@pytest.mark.parametrize(
    "chunk_tokens", [16, *(pytest.param(n, marks=pytest.mark.long) for n in (64, WHOLE))]
)
def test_chunk_sizes_and_mixed_batches_c32(chunk_tokens: int) -> None:
    scenarios.chunks_and_mixed_batches(SMOLLM2, PROMPTS, chunk_tokens)


@pytest.mark.parametrize(
    ("subject", "policy"),
    [
        (SMOLLM2, WritePolicy.WRITE_THROUGH),
        pytest.param(SMOLLM2, WritePolicy.WRITE_BACK, marks=pytest.mark.long),
        pytest.param(SMOLLM2, WritePolicy.WRITE_THROUGH_SELECTIVE, marks=pytest.mark.long),
        *((TINY_LLAMA, policy) for policy in WritePolicy),
    ],
    ids=str,
)
def test_under_eviction_and_preemption_c32(
    store: str, subject: Subject, policy: WritePolicy
) -> None:
    scenarios.eviction(subject, store, policy)


def test_preempted_requests_are_restored_from_the_host_c32() -> None:
    scenarios.preemption(SMOLLM2, PROMPTS[:1] + PROMPTS[4:], num_tokens=64)


def test_with_a_faulty_store_in_the_path_c32(tmp_path: Path) -> None:
    faults = "drop=0.02&truncate=0.02&corrupt=0.02&raise=0.1&seed=3"
    url = f"faulty+file://{tmp_path}/store?max=2GiB&{faults}"
    with engine_rig(store=url, **scenarios.WAIT) as rig:
        # Which call meets which fault depends on the threads: go on until there was one, and a hit.
        for turn in range(50):
            ask(rig, f"faulty store, turn {turn}")
            rig.flush(Tier.DEVICE, Tier.HOST)
            counters = rig.engine.status().counters
            met = [name for name in counters if name.startswith(("fetch:", "write:"))]
            if turn >= 2 and met and counters.get("fetched_pages"):
                break
        else:
            pytest.fail(f"no fault was met, or nothing came from the store: {counters}")


def test_batches_chosen_ahead_of_those_under_way_give_the_same_tokens_c32(store: str) -> None:
    """As on an accelerator: cold, from every tier, together, and short of device pages."""
    with engine_rig(store=store, overlap=True, **scenarios.WAIT) as rig:
        for turn, tiers in enumerate([(), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)]):
            rig.flush(*tiers)
            scenarios.ask(SMOLLM2, rig, PROMPTS, f"ahead, turn {turn}", stagger=turn)
            assert turn == 0 or rig.reused() > 0
    with engine_rig(device_pages=48, overlap=True) as rig:
        ask(rig, "ahead, short of pages")


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_prompt_computed_from_the_front_and_fetched_from_the_back_c32_c52(
    store: str, overlap: bool
) -> None:
    options = scenarios.WAIT | {"chunk_tokens": 32, "prefetch_threshold": 32}
    with engine_rig(store=store, overlap=overlap, way=Way.BOTH, **options) as rig:
        ask(rig, "cold")
        # Who is faster depends on the machine: go on until both had a part.
        for turn in range(50):
            rig.flush(Tier.DEVICE, Tier.HOST)
            ask(rig, f"both, turn {turn}")
            if turn and rig.counter("met_pages"):
                break
        else:
            pytest.fail("nothing was met")


def test_two_ranks_give_the_same_tokens_c32(store: str) -> None:
    """3 key-value heads on 2 ranks: one has two of them."""
    scenarios.two_ranks(SMOLLM2, store)


def test_the_oracle_notices_a_wrong_token_and_a_wrong_likelihood() -> None:
    with engine_rig(host_pages=0) as rig:
        (right,) = rig.answer(PROMPTS[:1], NUM_TOKENS)
    reference = references()[0]
    assert differences(reference, right) == 0
    wrong = [*right.tokens]
    wrong[3] = int(reference.logits[3].argmin())
    with pytest.raises(AssertionError, match="gap"):
        differences(reference, Answer(wrong, right.logprobs))
    off = msgspec.structs.replace(right.logprobs[2], logprob=right.logprobs[2].logprob + 0.01)
    likelihoods = [*right.logprobs[:2], off, *right.logprobs[3:]]
    with pytest.raises(AssertionError, match="gap"):
        differences(reference, Answer(right.tokens, likelihoods))


def test_wrong_pages_are_noticed_c32() -> None:
    scenarios.wrong_pages(SMOLLM2, PROMPTS[1])
