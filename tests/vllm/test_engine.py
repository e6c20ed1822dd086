"""Quire inside the real vLLM, on this machine's CPU: greedy tokens are those of vLLM alone.

Each engine is a process of its own, in the environment that `make test-vllm` makes, and is compared
with one without a connector that answered the same prompts.
"""

from pathlib import Path
from typing import Any

import pytest

from vllm_engines import (
    FORGET,
    LONG,
    MANY,
    RESET,
    SETTLE,
    Engines,
    Found,
    Subject,
    ask,
    is_clean,
    prompt,
    whole_pages,
)

BOTH = pytest.mark.parametrize(
    "subject", ["small", pytest.param("windows", marks=pytest.mark.long)], indirect=True
)
"""For cases in which windows are not likely to matter."""


class FirstLife:
    """An engine that writes to an empty store, and what it found."""

    def __init__(self, engines: Engines, subject: Subject, folder: Path) -> None:
        self.store = f"file://{folder}?max=2GiB"
        steps = [ask(LONG), FORGET, ask(LONG), ask(*MANY), FORGET, ask(*MANY), SETTLE]
        steps += [ask(LONG, salts=["a"]), FORGET, ask(LONG, salts=["b"]), FORGET]
        steps += [ask(LONG, salts=["b"]), RESET, ask(LONG), SETTLE]
        self.found: Found = engines.quire(subject.model, steps, self.store)


@pytest.fixture(scope="module")
def first_life(
    engines: Engines, subject: Subject, tmp_path_factory: pytest.TempPathFactory
) -> FirstLife:
    return FirstLife(engines, subject, tmp_path_factory.mktemp("store"))


def test_host_hits_concurrency_tenants_and_a_reset(subject: Subject, first_life: FirstLife) -> None:
    found = first_life.found
    cold, _, host, many, _, again, settled, tenant_a, _, tenant_b, _, same_b, _, fresh, end = found
    for one in (cold, host, tenant_a, tenant_b, same_b, fresh):
        assert one["tokens"] == subject.long
    for one in (many, again):
        assert one["tokens"] == subject.many
    assert cold["cached"] == [0]
    assert host["cached"] == [whole_pages(LONG)]
    assert min(again["cached"]) >= 64
    assert tenant_a["cached"] == tenant_b["cached"] == [0], "tenants share nothing"
    assert same_b["cached"] == [whole_pages(LONG)]
    assert fresh["cached"] == [0], "a reset forgets the store's pages too"
    for one in (settled, end):
        assert is_clean(one)
    assert settled["counters"]["written_pages"] > 0
    assert settled["metrics"]["vllm:prompt_tokens_cached_by_source:host"] >= whole_pages(LONG)


def test_the_store_after_a_restart_with_prompts_in_chunks(
    engines: Engines, subject: Subject, first_life: FirstLife
) -> None:
    chunks = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "enable_chunked_prefill": True}
    new = prompt(99, 300)
    steps = [ask(LONG), ask(*MANY), ask(new), FORGET, ask(new), SETTLE]
    first, many, cold, _, again, end = engines.quire(
        subject.model, steps, first_life.store, llm=chunks
    )
    assert first["tokens"] == subject.long
    assert first["cached"] == [whole_pages(LONG)]
    assert many["tokens"] == subject.many
    assert again["tokens"] == cold["tokens"]
    assert again["cached"][0] > cold["cached"][0]
    assert end["counters"]["fetched_pages"] > 0
    assert end["metrics"]["vllm:prompt_tokens_cached_by_source:disk"] >= whole_pages(LONG)
    assert is_clean(end)


@BOTH
def test_preemption_where_memory_is_tiny(engines: Engines, subject: Subject) -> None:
    blocks = 24 if subject.num_groups == 1 else 120
    tiny = {"num_gpu_blocks_override": blocks, "max_model_len": 512, "max_num_seqs": 8}
    steps = [ask(*MANY), SETTLE, FORGET, ask(*MANY), SETTLE]
    cold, after, _, again, end = engines.quire(subject.model, steps, llm=tiny)
    assert cold["tokens"] == again["tokens"] == subject.many
    assert end["preemptions"] > 0, "this should have been too small"
    assert is_clean(after)
    assert is_clean(end)


@BOTH
def test_a_store_that_loses_damages_and_fails(
    engines: Engines, subject: Subject, tmp_path: Path
) -> None:
    faults = "drop=0.1&truncate=0.1&corrupt=0.1&raise=0.2&delay=0.2&delay_s=0.05&seed=1"
    for _ in range(2):
        one, many, _, again, end = engines.quire(
            subject.model,
            [ask(LONG), ask(*MANY), FORGET, ask(LONG), SETTLE],
            f"faulty+file://{tmp_path}?{faults}",
        )
        assert one["tokens"] == again["tokens"] == subject.long
        assert many["tokens"] == subject.many
        assert is_clean(end)


def test_damage_behind_the_checks_is_seen_by_these_tests(engines: Engines, small: Subject) -> None:
    cold, _, one = engines.quire(
        small.model,
        [ask(LONG), FORGET, ask(LONG)],
        connector="DamagingConnector",
        module="sabotage",
    )
    assert cold["tokens"] == small.long
    assert one["tokens"] != small.long


@pytest.mark.long
def test_two_ranks_each_with_its_own_hands(engines: Engines, windows: Subject) -> None:
    one = prompt(3, 300)
    steps: list[dict[str, Any]] = [ask(one), FORGET, ask(one), SETTLE]
    ranks = {"tensor_parallel_size": 2, "max_num_batched_tokens": 512, "max_model_len": 512}
    cold, _, host, end = engines.quire(windows.model, steps, llm=ranks)
    assert cold["tokens"] == host["tokens"]
    assert host["cached"] == [whole_pages(one)]
    assert is_clean(end)
