"""Quire inside the real vLLM, on this machine's CPU: greedy tokens are those of vLLM alone.

Each test starts vLLM in a process of its own, in the environment that `make test-vllm` makes, and
compares with what one such process without a connector answered to the same prompts.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gemma import gemma_model
from quire.models import embedded_model

HERE = Path(__file__).parent
PAGE = 32
ANSWER = 12
TIMEOUT_S = 420


def prompt(number: int, length: int) -> list[int]:
    """Words of the model's vocabulary, in no order; half of it is common to all."""
    common, own = random.Random(0), random.Random(number)
    half = length // 2
    return [common.randrange(1000, 40000) for _ in range(half)] + [
        own.randrange(1000, 40000) for _ in range(length - half)
    ]


LONG = prompt(1, 420)
MANY = [prompt(number, 80 + 10 * number) for number in range(2, 18)]


def vllm(steps: list[dict[str, Any]], **told: Any) -> list[dict[str, Any]]:
    """What one vLLM process found."""
    scenario = {"model": str(embedded_model()), "steps": steps, **told}
    done = subprocess.run(
        [os.environ["QUIRE_VLLM_PYTHON"], str(HERE / "scenario.py")],
        input=json.dumps(scenario),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def quire(steps: list[dict[str, Any]], store: str = "", **told: Any) -> list[dict[str, Any]]:
    extra = {"host_memory": "256MiB", **({"store": store} if store else {})}
    return vllm(steps, **{"connector": "QuireConnector", "extra": extra, **told})


def ask(*prompts: list[int], **how: Any) -> dict[str, Any]:
    return {"do": "generate", "prompts": list(prompts), "max_tokens": ANSWER, **how}


FORGET, RESET, SETTLE = {"do": "forget_local"}, {"do": "reset"}, {"do": "settle"}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """What vLLM answers by itself."""
    long, many = vllm([ask(LONG), ask(*MANY)])
    return {"long": long["tokens"], "many": many["tokens"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"file://{tmp_path_factory.mktemp('store')}?max=2GiB"


@pytest.fixture(scope="module")
def first_life(store: str) -> list[dict[str, Any]]:
    """What an engine finds that writes to an empty store."""
    steps = [ask(LONG), FORGET, ask(LONG), ask(*MANY), FORGET, ask(*MANY), SETTLE]
    steps += [ask(LONG, salts=["a"]), FORGET, ask(LONG, salts=["b"]), FORGET]
    steps += [ask(LONG, salts=["b"]), RESET, ask(LONG), SETTLE]
    return quire([dict(step) for step in steps], store)


def test_host_hits_concurrency_tenants_and_a_reset(
    alone: dict[str, list[list[int]]], first_life: list[dict[str, Any]]
) -> None:
    found = first_life
    cold, _, host, many, _, again, settled, tenant_a, _, tenant_b, _, same_b, _, fresh, end = found
    for one in (cold, host, tenant_a, tenant_b, same_b, fresh):
        assert one["tokens"] == alone["long"]
    for one in (many, again):
        assert one["tokens"] == alone["many"]
    reused = (len(LONG) - 1) // PAGE * PAGE
    assert cold["cached"] == [0]
    assert host["cached"] == [reused], "all full pages but the one that is computed for a token"
    assert min(again["cached"]) >= 64
    assert tenant_a["cached"] == tenant_b["cached"] == [0], "tenants share nothing"
    assert same_b["cached"] == [reused]
    assert fresh["cached"] == [0], "a reset forgets the store's pages too"
    for one in (settled, end):
        assert (one["busy"], one["leases"]) == (False, 0)
        assert one["used_blocks"] <= 1, "vLLM keeps one block for itself"
    assert settled["counters"]["written_pages"] > 0


@pytest.mark.usefixtures("first_life")
def test_the_store_after_a_restart_with_prompts_in_chunks(
    alone: dict[str, list[list[int]]], store: str
) -> None:
    chunks = {"max_num_batched_tokens": 96, "max_num_seqs": 4, "enable_chunked_prefill": True}
    steps = [ask(LONG), ask(prompt(99, 300)), FORGET, ask(prompt(99, 300)), SETTLE]
    first, new, _, again, end = quire(steps, store, llm=chunks)
    assert first["tokens"] == alone["long"]
    assert first["cached"] == [(len(LONG) - 1) // PAGE * PAGE]
    assert again["tokens"] == new["tokens"]
    assert again["cached"][0] > new["cached"][0]
    assert end["counters"]["fetched_pages"] > 0
    assert (end["busy"], end["leases"]) == (False, 0)


def test_preemption_where_memory_is_tiny(alone: dict[str, list[list[int]]]) -> None:
    small = {"num_gpu_blocks_override": 24, "max_model_len": 512, "max_num_seqs": 8}
    steps = [ask(*MANY), SETTLE, FORGET, ask(*MANY), SETTLE]
    cold, after, _, again, end = quire(steps, llm=small)
    assert cold["tokens"] == again["tokens"] == alone["many"]
    assert end["preemptions"] > 0, "this should have been too small"
    for one in (after, end):
        assert (one["busy"], one["leases"]) == (False, 0)
        assert one["used_blocks"] <= 1


def test_a_store_that_loses_damages_and_fails(
    alone: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    faults = "drop=0.1&truncate=0.1&corrupt=0.1&raise=0.2&delay=0.2&delay_s=0.05&seed=1"
    url = f"faulty+file://{tmp_path}?{faults}"
    for _ in range(2):
        one, many, _, again, end = quire([ask(LONG), ask(*MANY), FORGET, ask(LONG), SETTLE], url)
        assert one["tokens"] == again["tokens"] == alone["long"]
        assert many["tokens"] == alone["many"]
        assert (end["busy"], end["leases"]) == (False, 0)


def test_a_store_that_is_not_there(alone: dict[str, list[list[int]]]) -> None:
    one, end = quire([ask(LONG), SETTLE], "redis://127.0.0.1:1")
    assert one["tokens"] == alone["long"]
    assert end["leases"] == 0


def test_loads_that_fail_are_computed_and_not_offered_again(
    alone: dict[str, list[list[int]]],
) -> None:
    steps = [ask(LONG), ask(*MANY), FORGET, ask(LONG), ask(*MANY), SETTLE]
    cold, _, _, one, many, end = quire(steps, connector="FailingConnector", module="sabotage")
    assert cold["tokens"] == one["tokens"] == alone["long"]
    assert many["tokens"] == alone["many"]
    assert end["counters"]["load_failed_pages"] > 0
    assert (end["busy"], end["leases"]) == (False, 0)


def test_windows_beside_full_layers() -> None:
    wide, model = prompt(3, 700), str(gemma_model())
    (alone,) = vllm([ask(wide)], model=model)
    cold, _, host, end = quire([ask(wide), FORGET, ask(wide), SETTLE], model=model)
    assert cold["tokens"] == host["tokens"] == alone["tokens"]
    assert host["cached"] == [(len(wide) - 1) // PAGE * PAGE], "beyond the window of 512 too"
    assert (end["busy"], end["leases"]) == (False, 0)


def test_two_ranks_each_with_its_own_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    one = prompt(3, 300)
    steps = [ask(one), FORGET, ask(one), SETTLE]
    cold, _, host, end = quire(steps, model=str(gemma_model()), llm={"tensor_parallel_size": 2})
    assert cold["tokens"] == host["tokens"]
    assert host["cached"] == [(len(one) - 1) // PAGE * PAGE]
    assert (end["busy"], end["leases"], end["used_blocks"]) == (False, 0, 1)


def test_damage_behind_the_checks_is_seen_by_these_tests(
    alone: dict[str, list[list[int]]],
) -> None:
    cold, _, one = quire(
        [ask(LONG), FORGET, ask(LONG)], connector="DamagingConnector", module="sabotage"
    )
    assert cold["tokens"] == alone["long"]
    assert one["tokens"] != alone["long"]
