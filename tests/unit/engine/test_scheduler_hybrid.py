"""The scheduler with windows and recurrent state: where chunks end, what is kept and shared."""

import numpy as np
import pytest

from engine_support import MIXES, PAGE, WINDOW, TinyEngine, oracle
from quire.engine.batch import Batch
from quire.engine.messages import CachedTokens
from quire.engine.request import Request
from quire.keys import Namespace, PrefixKey
from quire.types import NO_SLOT, RequestId, Tier

PROMPT = [(7 * i + 3) % 50 for i in range(41)]
FULL = (len(PROMPT) - 1) // PAGE * PAGE
HYBRIDS = MIXES[1:]
RECURRENT = [mix for mix in MIXES if "recurrent" in mix]


def other(seed: int, length: int = 30) -> list[int]:
    return [(seed * 13 + i * i) % 50 for i in range(length)]


def segments(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> list:
    """Every segment from now on."""
    seen: list = []
    launch = tiny.model.launch

    def launched(batch: Batch) -> None:
        seen.extend(batch.segments)
        launch(batch)

    monkeypatch.setattr(tiny.model, "launch", launched)
    return seen


@pytest.mark.parametrize("mix", HYBRIDS)
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 16, 1000])
def test_any_chunk_size_gives_the_same(mix, chunk_tokens):
    with TinyEngine(mix=mix, chunk_tokens=chunk_tokens) as tiny:
        assert tiny.answer(PROMPT, 19) == oracle(PROMPT, 19, mix=mix)


@pytest.mark.parametrize("mix", HYBRIDS)
def test_hits_are_reported_by_tier_c32(mix):
    with TinyEngine(mix=mix, store="memory://?max=1MiB") as tiny:

        def again() -> CachedTokens:
            request = tiny.ask(PROMPT, 2)
            tiny.run()
            assert tiny.tokens(request) == oracle(PROMPT, 2, mix=mix)
            return tiny.cached(request)

        assert again() == CachedTokens()
        assert again() == CachedTokens(device=FULL)
        tiny.manager.flush(Tier.DEVICE)
        assert again() == CachedTokens(host=FULL)
        tiny.manager.flush(Tier.DEVICE)
        tiny.manager.flush(Tier.HOST)
        assert again() == CachedTokens(store=FULL)


@pytest.mark.parametrize("mix", RECURRENT)
def test_a_prompt_stops_at_its_last_page_boundary_and_saves_there_c20(mix, monkeypatch):
    with TinyEngine(mix=mix, chunk_tokens=1000) as tiny:
        seen = segments(tiny, monkeypatch)
        tiny.answer(PROMPT, 1)
        assert [(s.start, s.num_tokens) for s in seen] == [(0, FULL), (FULL, len(PROMPT) - FULL)]
        assert seen[0].save != NO_SLOT
        assert tiny.manager.counters.snapshots == 1


@pytest.mark.parametrize("mix", RECURRENT)
def test_chunks_end_at_page_boundaries_c20(mix, monkeypatch):
    with TinyEngine(mix=mix, chunk_tokens=10) as tiny:
        seen = segments(tiny, monkeypatch)
        tiny.answer(PROMPT, 1)
        assert [s.start for s in seen] == [0, 8, 16, 24, 32, 40]
        assert all(s.save != NO_SLOT for s in seen[:-1])


@pytest.mark.parametrize("mix", HYBRIDS)
def test_the_next_turn_goes_on_from_the_end_of_the_last_c32(mix):
    with TinyEngine(mix=mix) as tiny:
        text = PROMPT
        for _ in range(4):
            request = tiny.ask(text, 17)
            tiny.run()
            answer = oracle(text, 17, mix=mix)
            assert tiny.tokens(request) == answer
            computed = len(text) + len(answer) - 1
            text = [*text, *answer, 1, 2, 3, 4, 5]
        request = tiny.ask(text, 1)
        tiny.run()
        assert tiny.cached(request).device == computed // PAGE * PAGE


@pytest.mark.parametrize("mix", HYBRIDS)
def test_a_prefix_that_was_branched_from_once_is_kept_c20(mix):
    """The second finds nothing usable where it branches off, and keeps it for the third."""
    shared = PROMPT[: 6 * PAGE]
    with TinyEngine(mix=mix) as tiny:
        found = []
        for seed in (1, 2, 3):
            prompt = shared + other(seed)
            request = tiny.ask(prompt, 3)
            tiny.run()
            assert tiny.tokens(request) == oracle(prompt, 3, mix=mix)
            found.append(tiny.cached(request).device)
        assert found == [0, 0, 6 * PAGE]


@pytest.mark.parametrize("mix", HYBRIDS)
def test_requests_that_arrive_together_share_what_the_first_computes_c20(mix):
    shared = PROMPT[: 8 * PAGE]
    with TinyEngine(mix=mix, chunk_tokens=12) as tiny:
        prompts = [shared + other(seed) for seed in range(4)]
        requests = [tiny.ask(prompt, 3) for prompt in prompts]
        tiny.run()
        for request, prompt in zip(requests, prompts, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 3, mix=mix)
        assert [tiny.cached(r).device for r in requests] == [0, *[8 * PAGE] * 3]


@pytest.mark.parametrize("mix", HYBRIDS)
def test_preempted_requests_go_on_c32(mix):
    with TinyEngine(mix=mix, device_pages=26, device_slots=8, chunk_tokens=16) as tiny:
        prompts = [other(seed, 40) for seed in range(4)]
        requests = [tiny.ask(prompt, 30) for prompt in prompts]
        tiny.run()
        assert tiny.scheduler.counters.preempted > 0
        for request, prompt in zip(requests, prompts, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 30, mix=mix)


@pytest.mark.parametrize("mix", RECURRENT)
@pytest.mark.parametrize("device_slots", [1, 2, 3])
def test_too_few_slots_make_requests_wait_and_nothing_else_c22(mix, device_slots):
    with TinyEngine(mix=mix, device_slots=device_slots, host_slots=1) as tiny:
        prompts = [other(seed, 25) for seed in range(5)]
        requests = [tiny.ask(prompt, 9) for prompt in prompts]
        tiny.run()
        for request, prompt in zip(requests, prompts, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 9, mix=mix)
        if device_slots == 1:
            assert tiny.manager.counters.snapshots_skipped > 0


@pytest.mark.parametrize("mix", MIXES)
def test_without_reuse_every_prompt_is_computed_whole(mix, monkeypatch):
    with TinyEngine(mix=mix, reuse=False, chunk_tokens=8, store="memory://?max=1MiB") as tiny:
        seen = segments(tiny, monkeypatch)
        for _ in range(2):
            request = tiny.ask(PROMPT, 5)
            tiny.run()
            assert tiny.tokens(request) == oracle(PROMPT, 5, mix=mix)
            assert tiny.cached(request) == CachedTokens()
        assert [s.num_tokens for s in seen if s.start == 0] == [len(PROMPT)] * 2
        assert all(s.save == NO_SLOT for s in seen)
        assert not tiny.engine.status().reuse
        assert tiny.manager.counters.committed_pages == 0
        assert not any(tier.used_pages for tier in tiny.engine.tiers())


@pytest.mark.parametrize("mix", [mix for mix in MIXES if "window" in mix])
def test_a_long_prompt_needs_no_more_than_a_window_and_a_chunk(mix, monkeypatch):
    with TinyEngine(mix=mix, chunk_tokens=8) as tiny:
        seen = segments(tiny, monkeypatch)
        prompt = other(5, 150)
        assert tiny.answer(prompt, 40) == oracle(prompt, 40, mix=mix)
        window = -(-(WINDOW - 1) // PAGE)
        assert max(len(s.window) // 4 for s in seen) <= window + 8 // PAGE + 1


@pytest.mark.parametrize("mix", RECURRENT)
def test_no_snapshots_no_reuse(mix):
    from quire.config import SnapshotConfig

    with TinyEngine(mix=mix) as tiny:
        object.__setattr__(tiny.manager.config, "snapshots", SnapshotConfig(per_path=0))
        for _ in range(2):
            request = tiny.ask(PROMPT, 5)
            tiny.run()
            assert tiny.tokens(request) == oracle(PROMPT, 5, mix=mix)
            assert tiny.cached(request) == CachedTokens()
        assert not tiny.manager.counters.snapshots


@pytest.mark.parametrize("mix", RECURRENT)
def test_requests_that_wait_on_every_state_there_is_all_get_one_in_turn(mix):
    """Each stands on a snapshot, and together they hold all slots: one after the other goes on."""
    with TinyEngine(mix=mix, device_slots=3) as tiny:
        prompts = [other(seed) for seed in range(1, 7)]
        for prompt in prompts:
            tiny.answer(prompt, 1)
        manager, nothing = tiny.manager, PrefixKey(Namespace("sum", "float32", PAGE), [])
        somebody = manager.acquire(manager.match(nothing), RequestId("somebody"))
        assert manager.begin(somebody)  # has the last slot, for long
        requests = [tiny.ask(prompt, 3) for prompt in prompts]
        for _ in range(2_000):
            if not len(tiny.scheduler):
                break
            tiny.step()
        for request, prompt in zip(requests, prompts, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 3, mix=mix)
        manager.release(somebody)


def of_peer(tiny, name, seed):
    tokens = np.array(other(seed, 6 * PAGE), dtype="<i4").tobytes()
    request = Request.of_peer(name, tokens, tiny.engine.namespace_of(""), priority=0, now=0.0)
    assert tiny.scheduler.add(request) is None
    return request


@pytest.mark.parametrize("mix", RECURRENT)
def test_what_is_computed_for_a_peer_waits_for_room_to_be_kept_c47(mix):
    """A prompt without the state at its end is of no use to a peer, which asked for that. Slots
    come back as peers take what they asked for."""
    with TinyEngine(mix=mix, device_slots=4, host_slots=1, chunk_tokens=1000) as tiny:
        requests = [of_peer(tiny, f"p{seed}", seed) for seed in range(6)]
        taken = []
        for _ in range(2_000):
            tiny.step()
            assert not any(request.failure for request in requests)
            for request in [r for r in tiny.scheduler.holding if r.settled]:
                assert request.lease.tail.end == 6
                tiny.scheduler.abort(request.id)  # the peer has it
                taken.append(request)
                break
        assert taken == requests


@pytest.mark.parametrize("mix", RECURRENT)
def test_a_peer_learns_that_what_it_asked_for_can_never_be_kept(mix):
    with TinyEngine(mix=mix, device_slots=1, host_slots=1) as tiny:
        request = of_peer(tiny, "p", 1)
        tiny.step(40)
        assert "no room" in request.failure
