"""The audit of a real model's pages, in each dtype: right ones pass by far, others are found."""

from collections.abc import Callable

import pytest
import torch

from dense_models import DENSE, VOCABULARY
from quire.engine.auditing import MOST_OFF
from quire.keys import PrefixKey
from quire.types import DEVICE, page_array
from small_engine import PAGE, SmallEngine

PROMPTS = [[(a * i + 5) % VOCABULARY for i in range(90)] for a in (3, 7, 11)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return DENSE["llama"](tmp_path_factory.mktemp("llama"))


def audited(small: SmallEngine, until: Callable[[], object]) -> None:
    for _ in range(20_000):
        if until():
            return
        small.step()
    raise AssertionError("the audit does not come to it")


def faults(small: SmallEngine) -> dict[str, int]:
    found = small.engine.manager.counters.faults
    return {name: count for name, count in found.items() if name.startswith("audit:")}


def device_page(small: SmallEngine, prompt: list[int], page: int) -> int:
    key = PrefixKey(small.engine.namespace_of(""), prompt)[: page + 1]
    node = small.engine.manager._core.tree.walk(key).nodes[-1]
    return int(page_array(node.held[DEVICE].pages)[page - node.start])


@pytest.mark.parametrize("dtype", MOST_OFF)
def test_right_pages_are_far_from_being_taken_for_wrong_ones(model, dtype, monkeypatch):
    # In chunks that are no multiple of a page: an audit computes a page in one piece.
    with SmallEngine(model, dtype=dtype, audit=100, chunk_tokens=37) as small:
        executor, off = small.engine._executor, []
        compare = executor.difference
        monkeypatch.setattr(
            executor, "difference", lambda *pages: off.append(compare(*pages)) or off[-1]
        )
        for prompt in PROMPTS:
            small.answer(prompt, max_tokens=12)
        audited(small, lambda: small.engine.manager.counters.audited_pages >= 40)
        assert not faults(small)
        assert max(off) < MOST_OFF[dtype] / 4


@pytest.mark.parametrize("dtype", MOST_OFF)
def test_a_page_of_another_prompt_is_found(model, dtype):
    with SmallEngine(model, dtype=dtype, audit=100) as small:
        right = [small.answer(prompt, max_tokens=12) for prompt in PROMPTS]
        pool = small.engine._executor._rank.worker.components["full"].device
        last = len(PROMPTS[0]) // PAGE - 1
        mine, other = (device_page(small, prompt, last) for prompt in PROMPTS[:2])
        with torch.no_grad():
            for layer in range(pool.layout.num_layers):
                for plane in pool.planes(layer):
                    plane[mine] = plane[other]
        key = PrefixKey(small.engine.namespace_of(""), PROMPTS[0])[: last + 1]
        audited(small, lambda: small.engine.manager.match(key).num_pages == last)
        assert "audit:wrong_device" in faults(small)
        if dtype == "float32":  # the others' answers may differ by the order of sums
            assert small.answer(PROMPTS[0], max_tokens=12) == right[0]
