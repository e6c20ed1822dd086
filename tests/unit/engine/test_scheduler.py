"""The scheduler over a tiny model whose answers are known, with real workers and stores."""

import pytest

from engine_support import PAGE, TinyEngine, oracle
from quire.engine.messages import CachedTokens, Finish
from quire.types import Tier

PROMPT = [(7 * i + 3) % 50 for i in range(30)]


def other(seed: int, length: int = 30) -> list[int]:
    return [(seed * 13 + i * i) % 50 for i in range(length)]


def test_the_answer_is_the_models():
    with TinyEngine() as tiny:
        assert tiny.answer(PROMPT, 9) == oracle(PROMPT, 9)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 16, 1000])
def test_any_chunk_size_gives_the_same(chunk_tokens):
    with TinyEngine(chunk_tokens=chunk_tokens) as tiny:
        assert tiny.answer(PROMPT, 9) == oracle(PROMPT, 9)


def test_a_prompt_of_one_token():
    with TinyEngine() as tiny:
        assert tiny.answer([5], 6) == oracle([5], 6)


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 5 * PAGE])
@pytest.mark.parametrize("mix", ["full", "full+window", "full+recurrent"])
def test_one_token_is_always_left_to_compute(length, mix):
    """With full attention alone, one and no more; other state is as of the end of a page."""
    prompt = PROMPT[:length]
    with TinyEngine(mix=mix) as tiny:
        for _ in range(2):
            request = tiny.ask(prompt, 3)
            tiny.run()
            assert tiny.tokens(request) == oracle(prompt, 3, mix=mix)
        whole = length // PAGE * PAGE == length and mix == "full"
        assert tiny.cached(request).device == (length - 1 if whole else (length - 1) // PAGE * PAGE)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_of_whole_pages_is_found_whole_in_every_tier(ahead):
    """One token of it is computed, nothing of it is written, and its answer goes on from there."""
    prompt = PROMPT[: 6 * PAGE]
    with TinyEngine(store="memory://?max=1MiB", ahead=ahead) as tiny:

        def again() -> tuple[CachedTokens, int]:
            before = tiny.model.num_computed
            request = tiny.ask(prompt, 2 * PAGE)
            tiny.run()
            assert tiny.tokens(request) == oracle(prompt, 2 * PAGE)
            return tiny.cached(request), tiny.model.num_computed - before

        _, computed = again()
        found = len(prompt) - 1
        assert again() == (CachedTokens(device=found), computed - found)
        tiny.manager.flush(Tier.DEVICE)
        assert again() == (CachedTokens(host=found), computed - found)
        tiny.manager.flush(Tier.DEVICE)
        tiny.manager.flush(Tier.HOST)
        assert again() == (CachedTokens(store=found), computed - found)
        tiny.manager.check_invariants()


def test_many_that_ask_the_same_at_once_compute_it_once():
    prompt = PROMPT[: 5 * PAGE]
    with TinyEngine() as tiny:
        requests = [tiny.ask(prompt, 3) for _ in range(4)]
        tiny.run()
        assert all(tiny.tokens(request) == oracle(prompt, 3) for request in requests)
        assert tiny.model.num_computed == len(prompt) + 3 + 4 * 2


def test_hits_are_reported_by_tier():
    with TinyEngine(store="memory://?max=1MiB") as tiny:
        full = (len(PROMPT) - 1) // PAGE * PAGE

        def again() -> CachedTokens:
            request = tiny.ask(PROMPT, 2)
            tiny.run()
            assert tiny.tokens(request) == oracle(PROMPT, 2)
            return tiny.cached(request)

        assert again() == CachedTokens()
        assert again() == CachedTokens(device=full)
        tiny.manager.flush(Tier.DEVICE)
        assert again() == CachedTokens(host=full)
        tiny.manager.flush(Tier.DEVICE)
        tiny.manager.flush(Tier.HOST)
        assert again() == CachedTokens(store=full)


def test_pages_are_shared_while_the_prompt_is_still_computed():
    """A second request for the same prompt waits for the first instead of computing it again."""
    with TinyEngine(chunk_tokens=8) as tiny:
        first = tiny.ask(PROMPT, 4)
        tiny.step()
        second = tiny.ask(PROMPT, 4)
        tiny.run()
        assert tiny.tokens(first) == tiny.tokens(second) == oracle(PROMPT, 4)
        assert tiny.cached(second).device == 28
        assert tiny.model.num_computed == 30 + 3 + 2 + 3
        assert tiny.scheduler.counters.shared_waits == 1


def test_four_samples_of_one_prompt_compute_it_once():
    with TinyEngine() as tiny:
        requests = [tiny.ask(PROMPT, 1) for _ in range(4)]
        tiny.run()
        assert [tiny.tokens(r) for r in requests] == [oracle(PROMPT, 1)] * 4
        assert tiny.model.num_computed == 30 + 3 * 2


def test_who_waits_for_a_prefix_goes_on_when_its_computer_is_aborted():
    with TinyEngine(chunk_tokens=4) as tiny:
        first = tiny.ask(PROMPT, 4)
        tiny.step()
        second = tiny.ask(PROMPT, 4)
        tiny.step()
        tiny.scheduler.abort(first)
        tiny.run()
        assert tiny.tokens(second) == oracle(PROMPT, 4)


def test_a_prompt_has_whole_chunks_whoever_decodes_beside_it():
    with TinyEngine(chunk_tokens=8) as tiny:
        decoding = [tiny.ask(other(seed, 5), 12) for seed in range(3)]
        while any(len(tiny.tokens(request)) < 2 for request in decoding):
            tiny.step()
        asked = tiny.ask(PROMPT, 1)
        sizes = []
        while not tiny.tokens(asked):
            before = tiny.model.num_computed
            tiny.step()
            sizes.append(tiny.model.num_computed - before)
        assert [size for size in sizes if size > 3] == [3 + 8, 3 + 8, 3 + 8, 3 + 6]


def test_uncomputed_pages_are_never_shared():
    """A request has pages for its whole prompt from the start; only full, computed ones count."""
    with TinyEngine(chunk_tokens=4) as tiny:
        tiny.ask(PROMPT, 4)
        tiny.step(2)
        (request,) = tiny.scheduler.running
        match = tiny.manager.match(request.key)
        assert match.num_pages <= request.computed // PAGE < len(PROMPT) // PAGE


def test_salts_separate_tenants():
    with TinyEngine(store="memory://?max=1MiB") as tiny:
        tiny.answer(PROMPT, 2, salt="a")
        request = tiny.ask(PROMPT, 2, salt="b")
        tiny.run()
        assert tiny.cached(request) == CachedTokens()
        assert tiny.tokens(request) == oracle(PROMPT, 2)


def test_stop_ids_end_the_answer():
    with TinyEngine() as tiny:
        stop = oracle(PROMPT, 9)[4]
        request = tiny.ask(PROMPT, 9, stop_ids=[stop])
        tiny.run()
        assert tiny.tokens(request) == oracle(PROMPT, 9, [stop])
        assert tiny.last(request).finish is Finish.STOP


def test_requests_that_do_not_fit_together_take_turns():
    prompts = [other(seed) for seed in range(6)]
    with TinyEngine(device_pages=18, host_pages=64) as tiny:
        requests = [tiny.ask(prompt, 20) for prompt in prompts]
        tiny.run()
        for prompt, request in zip(prompts, requests, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 20)
        assert tiny.scheduler.counters.preempted > 0
        assert tiny.manager.counters.loaded_pages > 0, "nothing was restored from the host"


def test_one_request_may_fill_the_whole_device():
    with TinyEngine(device_pages=14) as tiny:
        prompt = other(3, 40)
        tiny.answer(other(4), 2)
        assert tiny.answer(prompt, 14 * PAGE - 1 - 40) == oracle(prompt, 14 * PAGE - 1 - 40)


def test_a_long_prompt_is_not_overtaken_for_ever():
    with TinyEngine(device_pages=16, chunk_tokens=8) as tiny:
        small = [tiny.ask(other(seed, 12), 12) for seed in range(3)]
        long = tiny.ask(other(9, 50), 2)
        more = [tiny.ask(other(20 + seed, 12), 12) for seed in range(6)]
        for _ in range(10_000):
            tiny.step()
            if tiny.of(long):
                break
        unfinished = [r for r in small + more if not tiny.of(r) or tiny.last(r).finish is None]
        assert unfinished, "the long one came last"
        tiny.run()
        assert tiny.tokens(long) == oracle(other(9, 50), 2)


def test_priority_goes_first():
    with TinyEngine(max_running=1) as tiny:
        tiny.ask(other(1), 4)
        tiny.step()
        late, urgent = tiny.ask(other(2), 2), tiny.ask(other(3), 2, priority=5)
        tiny.run()
        order = [output.id for output in tiny.outputs if output.finish is not None]
        assert order.index(urgent) < order.index(late)


def test_a_full_queue_turns_requests_away_with_a_reason():
    with TinyEngine(max_waiting=2, max_running=1) as tiny:
        tiny.ask(other(1), 4)
        tiny.step()
        kept = [tiny.ask(other(2), 2), tiny.ask(other(3), 2)]
        refused = tiny.ask(other(4), 2)
        assert tiny.last(refused).finish is Finish.REJECTED
        assert "max_waiting" in tiny.last(refused).error
        tiny.run()
        assert all(tiny.last(request).finish is Finish.LENGTH for request in kept)


def test_deadlines_end_running_and_waiting_requests():
    with TinyEngine(max_running=1) as tiny:
        running, waiting = tiny.ask(other(1), 100, timeout_s=5), tiny.ask(other(2), 2, timeout_s=5)
        lasting = tiny.ask(other(3), 2, timeout_s=50)
        tiny.step(3)
        tiny.clock.ahead_s += 6
        tiny.run()
        assert tiny.last(running).finish is Finish.TIMEOUT
        assert tiny.last(waiting).finish is Finish.TIMEOUT
        assert tiny.tokens(lasting) == oracle(other(3), 2)
        assert not tiny.manager.leases


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_model_that_fails_fails_its_batch_only(where, ahead, capsys):
    with TinyEngine(ahead=ahead) as tiny:
        first = tiny.ask(other(1), 2)
        tiny.model.fail_next = where
        tiny.step(2)
        assert tiny.last(first).finish is Finish.ERROR
        assert "out of luck" in tiny.last(first).error
        assert tiny.answer(other(2), 2) == oracle(other(2), 2)
    assert "out of luck" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "num_tokens", "problem"),
    [
        ([], 2, "no tokens"),
        ([50], 2, "token ids"),
        ([-1], 2, "token ids"),
        ([1], 0, "max_tokens"),
        ([1] * 200, 100, "context"),
    ],
)
def test_what_cannot_be_computed_is_refused(tokens, num_tokens, problem):
    with TinyEngine() as tiny:
        request = tiny.ask(tokens, num_tokens)
        assert tiny.last(request).finish is Finish.ERROR
        assert problem in tiny.last(request).error


def test_a_failed_load_begins_again_with_the_right_answer(monkeypatch):
    from quire.transfer import cpu

    with TinyEngine() as tiny:
        tiny.answer(PROMPT, 2)
        tiny.manager.flush(Tier.DEVICE)
        real, broken = cpu.copy_rows, []

        def fail_once(*args):
            if not broken:
                broken.append(True)
                raise OSError("lost")
            real(*args)

        monkeypatch.setattr(cpu, "copy_rows", fail_once)
        assert tiny.answer(PROMPT, 5) == oracle(PROMPT, 5)
        assert tiny.scheduler.counters.restarted == 1


def test_waiting_requests_give_up_what_they_hold_before_a_running_one_stalls():
    """They keep the whole device from being evicted, and the one that runs must grow."""
    prompts = [other(seed, 20) for seed in range(3)]
    with TinyEngine(device_pages=20, max_running=1) as tiny:
        for prompt in prompts:
            tiny.answer(prompt, 1)
        running = tiny.ask(other(9, 8), 40)
        tiny.step()
        waiting = [tiny.ask(prompt, 3) for prompt in prompts]
        tiny.run()
        assert tiny.tokens(running) == oracle(other(9, 8), 40)
        for prompt, request in zip(prompts, waiting, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 3)


def test_the_cost_model_hears_of_full_batches_only(monkeypatch):
    """The tail after a hit takes long per token; it must not make recomputing look slow."""
    observed = []
    with TinyEngine(chunk_tokens=16) as tiny:
        monkeypatch.setattr(tiny.manager.costs, "observe_prefill", lambda n, _: observed.append(n))
        tiny.answer(PROMPT, 3)
        assert observed == [16, 14]
        tiny.answer(PROMPT, 3)
        assert observed == [16, 14]


# ---- tenants -------------------------------------------------------------------------------------


def order_of_service(tiny: TinyEngine, requests) -> list:
    """In the order of their first tokens."""
    seen: list = []
    for output in tiny.outputs:
        if output.id in requests and output.id not in seen:
            seen.append(output.id)
    return seen


def test_tenants_take_turns_whoever_asked_more() -> None:
    with TinyEngine(max_running=1) as tiny:
        many = [tiny.ask([i, i + 1, 7], 2, salt="a") for i in range(6)]
        few = [tiny.ask([i, i + 1, 9], 2, salt="b") for i in range(2)]
        tiny.run()
        order = order_of_service(tiny, {*many, *few})
        assert [r for r in order if r in many] == many
        assert [r for r in order if r in few] == few
        assert order.index(few[1]) <= 4, "it waited for all of the other tenant's"


def test_a_low_priority_is_served_after_some_turns_and_not_never() -> None:
    with TinyEngine(max_running=1, max_waiting=100) as tiny:
        tiny.ask([1, 2, 3], 2)
        low = tiny.ask([4, 5, 6], 2, priority=-1)
        high = [tiny.ask([i % 50, 8, 9], 2) for i in range(60)]
        tiny.run()
        order = order_of_service(tiny, {low, *high})
        assert 10 < order.index(low) < 30


def test_tenants_are_told_with_what_they_have() -> None:
    with TinyEngine() as tiny:
        tiny.answer([*range(12)], 2, salt="a")
        tiny.answer([*range(8)], 2)
        tiny.ask([*range(20)], 4, salt="b")
        found = {tenant.name: tenant for tenant in tiny.engine.tenants().tenants}
        assert list(found) == ["a", "", "b"]
        assert (found["a"].device_pages, found[""].device_pages) == (3, 2)
        assert found["b"].running + found["b"].waiting == 1
        tiny.run()
