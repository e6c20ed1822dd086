"""A draft head in the engine: the same answers, and proposals that are exactly the head's own.

Whatever the way by which its state came to a page, it must be the state that the head would have
computed: so each proposal is compared with one computed from the whole text at once.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from dense_models import DENSE, VOCABULARY
from eagle_models import Watching, chain, read_head, teacher_of, write_head
from quire.engine.config import ForwardKind
from quire.errors import ConfigError
from quire.keys import UnitKind
from quire.manager import Way
from quire.models import describe
from quire.types import DEVICE
from small_engine import PAGE, SmallEngine

AHEAD = 3
PROMPTS = [[(i * 37 + j * j * (i + 3)) % VOCABULARY for j in range(9 + 11 * i)] for i in range(5)]
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.2, "seed": 9, "top_k": 9},
]


class Subject:
    def __init__(self, folder, kind: str) -> None:
        self.model = DENSE[kind](folder / "model")
        self.teacher = teacher_of(self.model)
        self.path = write_head(self.teacher, folder / "head", num_draft_tokens=200)
        self.head = read_head(self.teacher, self.path)

    @property
    def has_windows(self) -> bool:
        return bool(describe(self.model).window_layers)

    def engine(self, **options) -> Watched:
        return Watched(self, **options)

    def chain(self, tokens, count) -> list[int]:
        return chain(self.teacher, self.head, tokens, count)


class Watched(SmallEngine):
    def __init__(self, subject: Subject, **options) -> None:
        given = {"speculate": f"eagle:{subject.path}", "draft_tokens": AHEAD}
        super().__init__(subject.model, **given | options)
        self.watching = self.engine.scheduler.drafting.speculation = Watching(AHEAD)

    def check_proposals(self, subject: Subject) -> None:
        self.watching.check(subject.chain)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def subject(request, tmp_path_factory) -> Subject:
    return Subject(tmp_path_factory.mktemp("subject"), request.param)


@pytest.fixture(scope="module")
def expected(subject) -> list[list[int]]:
    with SmallEngine(subject.model) as plain:
        asked = [ask(plain, i) for i in range(len(PROMPTS))]
        plain.run()
        return [plain.tokens(request) for request in asked]


def ask(engine: SmallEngine, number: int):
    return engine.ask(PROMPTS[number], max_tokens=20, **PARAMS[number])


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_those_without_and_proposals_the_heads_own(subject, expected, overlap) -> None:
    with subject.engine(overlap=overlap) as engine:
        asked = [ask(engine, i) for i in range(len(PROMPTS))]
        engine.run()
        assert [engine.tokens(request) for request in asked] == expected
        engine.check_proposals(subject)


def test_a_hit_on_the_device_brings_the_heads_state_along(subject) -> None:
    prompt = PROMPTS[4]
    with subject.engine() as engine:
        first = engine.answer(prompt, max_tokens=12, temperature=0.0)
        engine.check_proposals(subject)
        longer = [*prompt, *first, 5, 6, 7]
        with SmallEngine(subject.model) as plain:
            wanted = plain.answer(longer, max_tokens=12, temperature=0.0)
        request = engine.ask(longer, max_tokens=12, temperature=0.0)
        engine.run()
        assert engine.tokens(request) == wanted
        # All but the last pair of what was computed: its second token came after the end.
        assert engine.cached(request).device == (len(prompt) + 11) // PAGE * PAGE
        engine.check_proposals(subject)


def test_host_and_store_bring_it_too_and_the_next_start(subject, tmp_path) -> None:
    text, store = list(PROMPTS[4]), f"file://{tmp_path}/store?max=64MiB"
    options = {"store": store, "prefetch_threshold": PAGE}
    with subject.engine(**options) as engine:
        text += engine.answer(text, max_tokens=12, temperature=0.0)
        engine.check_proposals(subject)
        engine.engine.manager.flush(DEVICE)
        text = next_turn(engine, text, "host")
        engine.check_proposals(subject)
    with subject.engine(**options) as engine:
        next_turn(engine, text, "store")
        engine.check_proposals(subject)


def next_turn(engine: SmallEngine, text: list[int], tier: str) -> list[int]:
    """Go on from a text whose last pair of tokens was never computed; it comes from a tier."""
    request = engine.ask([*text, 5, 6, 7], max_tokens=12, temperature=0.0)
    engine.run()
    assert getattr(engine.cached(request), tier) == (len(text) - 1) // PAGE * PAGE
    return [*text, 5, 6, 7, *engine.tokens(request)]


def test_a_branch_shares_the_pairs_before_it(subject) -> None:
    """Right at the end of a page the last pair is another: a page less is shared."""
    if subject.has_windows:
        pytest.skip("windows are kept at the ends of requests only")
    prompt, cut = PROMPTS[4], 5 * PAGE
    other = [*prompt[:cut], *(token ^ 1 for token in prompt[cut:])]
    with subject.engine() as engine, SmallEngine(subject.model) as plain:
        engine.answer(prompt, max_tokens=4, temperature=0.0)
        for branch, shared in ((other, cut - PAGE), ([*prompt[: cut + 1], 9, 8, 7], cut)):
            request = engine.ask(branch, max_tokens=12, temperature=0.0)
            engine.run()
            assert engine.tokens(request) == plain.answer(branch, max_tokens=12, temperature=0.0)
            assert engine.cached(request).device == shared
            engine.check_proposals(subject)


def test_what_is_met_from_the_store_has_it_too(subject, tmp_path) -> None:
    """The front of a prompt is computed while its back is fetched."""
    if subject.has_windows:
        pytest.skip("with windows nothing is met")
    options = {"store": f"file://{tmp_path}/store?max=64MiB", "prefetch_threshold": PAGE}
    prompt = [(7 * i + i * i) % VOCABULARY for i in range(30 * PAGE)]
    with subject.engine(**options) as engine:
        first = engine.answer(prompt, max_tokens=6, temperature=0.0)
    with subject.engine(**options | {"chunk_tokens": 2 * PAGE}) as engine:
        engine.engine.manager.costs.force(Way.BOTH)
        assert engine.answer(prompt, max_tokens=6, temperature=0.0) == first
        engine.check_proposals(subject)


def test_without_its_pages_the_head_proposes_something_else(subject) -> None:
    """So the tests above would have seen it."""
    prompt = PROMPTS[4]
    with subject.engine() as engine:
        engine.answer(prompt, max_tokens=4, temperature=0.0)
        worker = engine.engine._executor._rank.worker
        pool = worker.components["full"].device
        for plane in pool.planes(pool.layout.num_layers - 1):
            plane.zero_()
        engine.watching.seen = []
        with SmallEngine(subject.model) as plain:
            wanted = plain.answer(prompt, max_tokens=12, temperature=0.0)
        assert engine.answer(prompt, max_tokens=12, temperature=0.0) == wanted
        with pytest.raises(AssertionError):
            engine.check_proposals(subject)


def test_preempted_requests_keep_it(subject, expected) -> None:
    few = 17 * (3 + 1) * 2 * PAGE * 3 * 16 * 4
    with subject.engine(device_bytes=few, typical_tokens=64, max_running=4) as engine:
        asked = [ask(engine, i) for i in range(len(PROMPTS))] + [ask(engine, 4)]
        engine.run()
        assert [engine.tokens(request) for request in asked] == [*expected, expected[4]]
        assert engine.engine.scheduler.counters.preempted > 0
        engine.check_proposals(subject)


def test_its_pages_and_those_of_plain_engines_never_meet(subject, tmp_path) -> None:
    options = {"store": f"file://{tmp_path}/store?max=64MiB", "prefetch_threshold": PAGE}
    with SmallEngine(subject.model, **options) as plain:
        plain.answer(PROMPTS[4], max_tokens=4, temperature=0.0)
        assert plain.engine.info.unit is UnitKind.TOKEN
    with subject.engine(**options) as engine:
        assert engine.engine.info.unit is UnitKind.PAIR
        assert engine.engine.info.fingerprint != plain.engine.info.fingerprint
        request = engine.ask(PROMPTS[4], max_tokens=4, temperature=0.0)
        engine.run()
        assert engine.cached(request).total == 0


def test_a_head_that_does_not_fit_is_refused_with_the_reason(subject, tmp_path) -> None:
    other = DENSE["qwen3"](tmp_path / "other", num_key_value_heads=2)
    with pytest.raises(ConfigError, match="number of key-value heads is 3 and the model's 2"):
        SmallEngine(other, speculate=f"eagle:{subject.path}")


def test_a_model_without_a_head_of_ours_is_told_so(subject) -> None:
    with pytest.raises(ConfigError, match="give one as eagle:DIR"):
        SmallEngine(subject.model, speculate="eagle")
    with pytest.raises(ConfigError, match="computed by transformers"):
        SmallEngine(
            subject.model, speculate=f"eagle:{subject.path}", forward=ForwardKind.TRANSFORMERS
        )
    with pytest.raises(ConfigError, match="runs on one rank"):
        SmallEngine(subject.model, speculate=f"eagle:{subject.path}", tp=3)
