"""With real weights: the answer with proposals is the answer without, token for token.

Whatever is asked for: the likeliest token, draws by seed, penalties that look at what came before,
log probabilities. Proposals are right, wrong and half right in turn.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from dense_models import DENSE, VOCABULARY
from quire.errors import ConfigError
from small_engine import SmallEngine
from speculating import Eager, FixedPrices, Oracle

PLAN = [3, 0, 1, 4, -1, 2]
NUM_TOKENS = 24
WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    "penalties": {
        "temperature": 0.8,
        "seed": 7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "logit_bias": {3: 2.0, 9: -5.0},
    },
    "greedy_penalties": {"temperature": 0.0, "frequency_penalty": 1.5},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
}
PROMPTS = [[(i * 37 + j * j * (i + 3)) % VOCABULARY for j in range(9 + 11 * i)] for i in range(6)]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen2_windows"])
def model(request, tmp_path_factory):
    return DENSE[request.param](tmp_path_factory.mktemp("model"))


def ask_all(engine: SmallEngine):
    return [
        engine.ask(prompt, max_tokens=NUM_TOKENS, **params)
        for prompt, params in zip(PROMPTS, WAYS.values(), strict=True)
    ]


def knowing(engine: SmallEngine, answers: dict[tuple[int, ...], list[int]]) -> None:
    """Let proposals be made from what is known to come."""
    speculation = engine.engine.scheduler.drafting.speculation

    def coming(tokens, count):
        for prompt, answer in answers.items():
            whole = [*prompt, *answer]
            if tokens == whole[: len(tokens)]:
                return whole[len(tokens) : len(tokens) + count]
        return []

    speculation.new_proposer = lambda tokens: Oracle(tokens, coming, PLAN, VOCABULARY)
    speculation.new_length = Eager
    speculation.prices = FixedPrices()


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_the_same_whatever_is_asked_for(model, overlap) -> None:
    with SmallEngine(model) as plain:
        asked = ask_all(plain)
        plain.run()
        expected = [plain.tokens(request) for request in asked]
        scores = plain.logprobs(asked[-1])
    known = {tuple(p): answer for p, answer in zip(PROMPTS, expected, strict=True)}
    with SmallEngine(model, speculate="ngram", draft_tokens=4, overlap=overlap) as engine:
        knowing(engine, known)
        asked = ask_all(engine)
        engine.run()
        assert [engine.tokens(request) for request in asked] == expected
        assert min(engine.accepted(request) for request in asked) > 4
        again = engine.logprobs(asked[-1])
        assert [s.top_ids for s in again] == [s.top_ids for s in scores]
        for one, other in zip(again, scores, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_under_pressure_too(model) -> None:
    """Preempted with proposals in flight, restored from the host, windows and all."""
    with SmallEngine(model) as plain:
        expected = [plain.answer(p, max_tokens=40, temperature=0.0) for p in PROMPTS]
    known = {tuple(p): answer for p, answer in zip(PROMPTS, expected, strict=True)}
    few = 18 * 3 * 2 * 8 * 3 * 16 * 4  # about that many pages
    with SmallEngine(
        model, speculate="ngram", device_bytes=few, typical_tokens=64, max_running=4
    ) as engine:
        knowing(engine, known)
        asked = [engine.ask(p, max_tokens=40, temperature=0.0) for p in PROMPTS]
        engine.run()
        assert [engine.tokens(request) for request in asked] == expected
        assert engine.engine.scheduler.counters.preempted > 0


def test_text_that_repeats_itself_is_looked_up(tmp_path) -> None:
    """No help from the test: what the model says again is proposed from what it said before."""
    model = DENSE["llama"](tmp_path / "model")
    prompt = PROMPTS[2] * 3
    with SmallEngine(model) as plain:
        expected = plain.answer(prompt, max_tokens=80, temperature=0.0)
    with SmallEngine(model, speculate="ngram") as engine:
        request = engine.ask(prompt, max_tokens=80, temperature=0.0)
        engine.run()
        assert engine.tokens(request) == expected


def test_recurrent_models_are_refused_with_the_reason(tmp_path) -> None:
    from hybrid_models import TINY

    name = "qwen3_next"
    model = TINY[name](tmp_path / "model")
    with pytest.raises(ConfigError, match="cannot be rolled back"):
        SmallEngine(model, speculate="ngram")
