"""C32 on a real model and real prompts: the same greedy tokens, wherever the prefix came from."""

import pytest

from e2e.exactness.oracle import NUM_TOKENS, differences, references
from e2e.exactness.rig import engine_rig
from quire.config import PrefetchPolicy, WritePolicy
from quire.types import Tier

PROMPTS = [reference.prompt for reference in references()]
WHOLE = 8192


def check(answers: list[list[int]], what: str) -> None:
    noise = sum(map(differences, references(), answers))
    print(f"{what}: {len(answers)} answers of {NUM_TOKENS} tokens, {noise} differ by fp32 noise")


def reused(rig, tier: str) -> int:
    return sum(getattr(cached, tier) for cached in rig.cached)


@pytest.fixture
def store(tmp_path):
    return f"file://{tmp_path}/store?max=2GiB"


def test_every_tier_gives_the_same_tokens_c32(monkeypatch, store):
    wait = PrefetchPolicy.WAIT_COMPLETE
    with engine_rig(monkeypatch, store=store, prefetch_policy=wait, prefetch_threshold=16) as rig:
        check([rig.answer([prompt], NUM_TOKENS)[0] for prompt in PROMPTS], "cold, one by one")
        check(rig.answer(PROMPTS, NUM_TOKENS), "device")
        assert reused(rig, "device") > 0.8 * sum(map(len, PROMPTS))

        rig.flush(Tier.DEVICE)
        check(rig.answer(PROMPTS, NUM_TOKENS), "host")
        assert reused(rig, "host") > 0.5 * sum(map(len, PROMPTS))

        rig.flush(Tier.DEVICE, Tier.HOST)
        check(rig.answer(PROMPTS, NUM_TOKENS), "store")
        assert reused(rig, "store") > 0.5 * sum(map(len, PROMPTS))
        rig.settle()

    with engine_rig(monkeypatch, store=store, prefetch_policy=wait, prefetch_threshold=16) as rig:
        check(rig.answer(PROMPTS, NUM_TOKENS), "store, after a restart")
        assert reused(rig, "store") > 0.5 * sum(map(len, PROMPTS))
        assert reused(rig, "device") + reused(rig, "host") < 0.5 * sum(map(len, PROMPTS))


def test_what_was_generated_is_reused_by_the_next_turn_c32(monkeypatch):
    with engine_rig(monkeypatch) as rig:
        first = rig.answer(PROMPTS, NUM_TOKENS)
        longer = [p + answer for p, answer in zip(PROMPTS, first, strict=True)]
        warm = rig.answer(longer, NUM_TOKENS)
        # The last token of an answer is never computed: at least the pages before it are there.
        assert reused(rig, "device") >= sum((len(p) - 1) // 16 * 16 for p in longer)
    with engine_rig(monkeypatch, host_pages=0) as rig:
        assert rig.answer(longer, NUM_TOKENS) == warm


@pytest.mark.parametrize("chunk_tokens", [16, 64, WHOLE])
def test_chunk_sizes_and_mixed_batches_c32(monkeypatch, chunk_tokens):
    """Staggered arrivals: prompts and answers are computed in the same batches."""
    with engine_rig(monkeypatch, chunk_tokens=chunk_tokens) as rig:
        check(rig.answer(PROMPTS, NUM_TOKENS, stagger=3), f"cold, chunks of {chunk_tokens}")
        check(rig.answer(PROMPTS[::-1], NUM_TOKENS)[::-1], f"device, chunks of {chunk_tokens}")


@pytest.mark.parametrize("policy", list(WritePolicy), ids=lambda policy: policy.value)
def test_under_eviction_and_preemption_c32(monkeypatch, store, policy):
    """The device holds less than the requests need together: they take turns."""
    longest = max(map(len, PROMPTS)) + NUM_TOKENS
    with engine_rig(
        monkeypatch,
        device_pages=longest // 16 + 4,
        host_pages=96,
        store=store,
        chunk_tokens=64,
        write_policy=policy,
        prefetch_threshold=32,
    ) as rig:
        for turn in range(2):
            check(rig.answer(PROMPTS, NUM_TOKENS, stagger=turn), f"{policy.value}, turn {turn}")
        counters = rig.engine.status().counters
        assert counters["evicted_device_pages"] > 0


def test_preempted_requests_are_restored_from_the_host_c32(monkeypatch):
    """Two requests fit when they are admitted, and no longer when they have grown."""
    prompts = PROMPTS[:1] + PROMPTS[4:]
    pages = sum(len(p) // 16 + 1 for p in prompts) + 1
    with engine_rig(monkeypatch, device_pages=pages, host_pages=96) as rig:
        grown = rig.answer(prompts, 64)
        counters = rig.engine.status().counters
        assert counters["requests_preempted"] > 0
    with engine_rig(monkeypatch, host_pages=0) as rig:
        assert rig.answer(prompts, 64) == grown


def test_with_a_faulty_store_in_the_path_c32(monkeypatch, tmp_path):
    faults = "drop=0.02&truncate=0.02&corrupt=0.02&raise=0.1&seed=3"
    url = f"faulty+file://{tmp_path}/store?max=2GiB&{faults}"
    with engine_rig(monkeypatch, store=url, prefetch_threshold=16) as rig:
        for turn in range(3):
            check(rig.answer(PROMPTS, NUM_TOKENS), f"faulty store, turn {turn}")
            rig.flush(Tier.DEVICE, Tier.HOST)
        counters = rig.engine.status().counters
        assert counters.get("fetched_pages"), counters
        assert any(name.startswith(("fetch:", "write:")) for name in counters), "no fault met"


def test_two_ranks_give_the_same_tokens_c32(monkeypatch, store):
    """3 key-value heads on 2 ranks: one has two of them."""
    with engine_rig(monkeypatch, tp=2, store=store, prefetch_threshold=16) as rig:
        check(rig.answer(PROMPTS, NUM_TOKENS), "two ranks, cold")
        rig.flush(Tier.DEVICE)
        check(rig.answer(PROMPTS, NUM_TOKENS), "two ranks, host")
        assert reused(rig, "host") > 0
        rig.flush(Tier.DEVICE, Tier.HOST)
        check(rig.answer(PROMPTS, NUM_TOKENS), "two ranks, store")
        assert reused(rig, "store") > 0


def test_the_oracle_notices_a_wrong_token():
    reference = references()[0]
    wrong = [*reference.tokens]
    wrong[3] = int(reference.logits[3].argmin())
    with pytest.raises(AssertionError, match="gap"):
        differences(reference, wrong)


def test_wrong_pages_are_noticed_c32(monkeypatch):
    """A negative control: with the heads of the cached pages swapped, the answer must change."""
    with engine_rig(monkeypatch, host_pages=0) as rig:
        rig.answer([PROMPTS[1]], NUM_TOKENS)
        pool = rig.engine._executor._rank.worker.components["full"].device
        for layer in range(pool.layout.num_layers):
            for plane in pool.planes(layer):
                plane.copy_(plane.flip(2))
        tokens = rig.answer([PROMPTS[1]], NUM_TOKENS)[0]
        assert reused(rig, "device") > 0
        with pytest.raises(AssertionError, match="gap"):
            differences(references()[1], tokens)
