"""Batches that are chosen and launched before the one ahead of them has ended.

Whoever asks sees no difference: the same tokens, no token after the end of an answer, an abort that
holds, pages that are shared only when they are known to be right.
"""

from __future__ import annotations

import pytest

from engine_support import PAGE, TinyEngine, oracle
from quire.engine.executor import RankLost
from quire.engine.messages import Finish, Generate, SamplingParams
from quire.types import RequestId


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * 7 + i * i * (seed + 1)) % 50 for i in range(count)]


def test_the_next_batch_is_launched_before_the_last_one_is_taken_in() -> None:
    with TinyEngine(ahead=True) as tiny:
        request = tiny.ask(tokens(1, 10), 4)
        tiny.step()
        assert not tiny.of(request)
        assert tiny.model.num_computed == 10
        tiny.step()
        assert tiny.model.num_computed == 11
        assert tiny.tokens(request) == oracle(tokens(1, 10), 4)[:1]
        tiny.run()
        assert tiny.tokens(request) == oracle(tokens(1, 10), 4)


def test_nothing_is_computed_beyond_the_tokens_asked_for() -> None:
    """The end by length is known before it comes; only a stop token is seen a step late."""
    with TinyEngine(ahead=True, chunk_tokens=4) as tiny:
        tiny.answer(tokens(1, 10), 4)
        assert tiny.model.num_computed == 10 + 3


def test_what_was_computed_after_a_stop_token_is_dropped() -> None:
    prompt = tokens(1, 10)
    free = oracle(prompt, 20)
    stop = free[3]
    with TinyEngine(ahead=True) as tiny:
        request = tiny.ask(prompt, 20, stop_ids=[stop])
        other = tiny.ask(tokens(2, 9), 20)
        tiny.run()
        assert tiny.tokens(request) == oracle(prompt, 20, [stop])
        assert tiny.last(request).finish is Finish.STOP
        assert tiny.tokens(other) == oracle(tokens(2, 9), 20)
        assert not tiny.manager.leases
        # What it leaves in the cache is right.
        assert tiny.answer(prompt + free[:8], 5) == oracle(prompt + free[:8], 5)


def test_an_aborted_id_may_come_again_at_once() -> None:
    """What was computed for the first of that name is not given to the second."""
    params = SamplingParams(max_tokens=6, temperature=0)
    with TinyEngine(ahead=True) as tiny:
        tiny.ask(tokens(1, 12), 6)
        tiny.step(2)
        tiny.scheduler.abort(RequestId("r1"))
        heard = len(tiny.of(RequestId("r1")))
        prompt = tokens(3, 9)
        data = b"".join(token.to_bytes(4, "little") for token in prompt)
        tiny.engine.handle(Generate(RequestId("r1"), data, params))
        tiny.run()
        outputs = tiny.of(RequestId("r1"))[heard:]
        assert [t for output in outputs for t in output.tokens] == oracle(prompt, 6)


def test_preemption_waits_for_what_is_under_way() -> None:
    prompts = [tokens(seed, 3 * PAGE) for seed in range(4)]
    with TinyEngine(ahead=True, device_pages=20, max_running=4) as tiny:
        requests = [tiny.ask(prompt, 24) for prompt in prompts]
        tiny.run()
        assert tiny.scheduler.counters.preempted > 0, "there was no pressure"
        for prompt, request in zip(prompts, requests, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 24)


def test_pages_are_shared_only_when_their_batch_has_ended() -> None:
    """A device that breaks has shared nothing that it did not finish."""
    prompt = tokens(1, 4 * PAGE + 1)
    with TinyEngine(ahead=True, chunk_tokens=2 * PAGE) as tiny:
        tiny.ask(prompt, 2)
        tiny.step()
        key = next(iter(tiny.scheduler.requests())).key
        assert tiny.manager.match(key).num_pages == 0
        tiny.step()
        assert tiny.manager.match(key).num_pages == 2

        def broken(meanwhile: object) -> None:
            raise RankLost("the accelerator is broken")

        tiny.model.collect = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(RankLost):
            tiny.step()
        assert tiny.manager.match(key).num_pages == 2
