"""Whoever asks cannot tell from the answer that tokens were proposed ahead.

The model is SumModel: any wrong, missing or early page changes what follows. The proposer knows
what will come and says right, wrong and half-right chains, as Hypothesis likes.
"""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_support import PAGE, VOCABULARY, TinyEngine, oracle
from quire.engine.messages import Finish
from speculating import speculation

MIXES = ("full", "full+window")
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5 * PAGE)
asks = st.lists(
    st.tuples(prompts, st.integers(1, 24), st.lists(st.integers(0, VOCABULARY - 1), max_size=3)),
    min_size=1,
    max_size=4,
)
plans = st.lists(st.integers(-1, 5), min_size=1, max_size=6)
common = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def tiny(mix: str, plan: list[int], max_tokens: int, **options) -> TinyEngine:
    def answers(tokens, count):
        return oracle(tokens, count, mix=mix)

    drafts = speculation(answers, max_tokens, plan, VOCABULARY)
    return TinyEngine(mix=mix, speculation=drafts, **options)


@common
@given(
    asks=asks,
    plan=plans,
    max_tokens=st.integers(1, 6),
    mix=st.sampled_from(MIXES),
    loop=st.fixed_dictionaries(
        {"ahead": st.booleans(), "chunk_tokens": st.sampled_from((4, 8, 64))}
    ),
)
def test_answers_are_those_without_proposals(asks, plan, max_tokens, mix, loop):
    with tiny(mix, plan, max_tokens, **loop) as engine:
        requests = [engine.ask(p, count, stop_ids=stops) for p, count, stops in asks]
        engine.run()
        for request, (prompt, count, stops) in zip(requests, asks, strict=True):
            expected = oracle(prompt, count, stops, mix)
            assert engine.tokens(request) == expected
            is_stopped = expected[-1] in stops
            assert engine.last(request).finish is (Finish.STOP if is_stopped else Finish.LENGTH)
        assert not engine.manager.leases
        # What they left in the cache is right, too: the next turn stands on it.
        prompt = [*asks[0][0], *oracle(asks[0][0], 20, mix=mix)]
        assert engine.answer(prompt, 5) == oracle(prompt, 5, mix=mix)


@common
@given(
    asks=st.lists(st.tuples(prompts, st.integers(8, 24)), min_size=3, max_size=5),
    plan=plans,
    max_tokens=st.integers(1, 6),
    mix=st.sampled_from(MIXES),
    ahead=st.booleans(),
)
def test_preempted_requests_go_on_as_if_they_had_not_been(asks, plan, max_tokens, mix, ahead):
    options = {"device_pages": 16, "host_pages": 48, "max_running": 4, "ahead": ahead}
    with tiny(mix, plan, max_tokens, **options) as engine:
        requests = [engine.ask(prompt, count) for prompt, count in asks]
        engine.run()
        for request, (prompt, count) in zip(requests, asks, strict=True):
            assert engine.tokens(request) == oracle(prompt, count, mix=mix)
