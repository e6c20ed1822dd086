"""Trees of proposals in the engine: the same answers whichever branch was right, in every tier.

A test knows what will come, and puts it into the trunk of a tree, or beside it. So paths that leave
the trunk are kept as often as the test likes, and what they leave in the pages is used again.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from dense_models import DENSE, VOCABULARY
from eagle_models import Branching, chain, read_head, teacher_of, write_head
from quire.engine.branches import num_levels
from quire.errors import ConfigError
from quire.types import DEVICE
from small_engine import PAGE, SmallEngine

LEVELS = 3
PROMPTS = [[(i * 37 + j * j * (i + 3)) % VOCABULARY for j in range(9 + 11 * i)] for i in range(5)]
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.2, "seed": 9, "top_k": 9},
]


class Subject:
    def __init__(self, folder) -> None:
        self.model = DENSE["llama"](folder / "model")
        self.teacher = teacher_of(self.model)
        self.path = write_head(self.teacher, folder / "head", num_draft_tokens=200)
        self.head = read_head(self.teacher, self.path)
        with SmallEngine(self.model) as plain:
            asked = [ask(plain, i) for i in range(len(PROMPTS))]
            plain.run()
            self.expected = [plain.tokens(request) for request in asked]
        known = zip(PROMPTS, self.expected, strict=True)
        self.answers = {tuple(prompt): answer for prompt, answer in known}

    def engine(self, **options) -> Trees:
        return Trees(self, **options)

    def check(self, engine: Trees) -> None:
        """The trunks that the head proposed are what it proposes from the whole text."""
        seen, engine.knowing.seen = engine.knowing.seen, []
        made = [(text, tokens) for text, tokens in seen if tokens]
        assert made
        for text, tokens in made:
            levels = num_levels(len(tokens), 1)
            assert tokens[:levels] == chain(self.teacher, self.head, text, levels)
            assert all(a != b for a, b in zip(tokens[:levels], tokens[levels:], strict=True))


class Trees(SmallEngine):
    def __init__(self, subject: Subject, **options) -> None:
        given = {"speculate": f"eagle-tree:{subject.path}", "draft_tokens": LEVELS}
        super().__init__(subject.model, **given | options)
        self.knowing = self.engine.scheduler.drafting.speculation = Branching(
            LEVELS, subject.answers, VOCABULARY
        )


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Subject:
    return Subject(tmp_path_factory.mktemp("subject"))


def ask(engine: SmallEngine, number: int):
    return engine.ask(PROMPTS[number], max_tokens=20, **PARAMS[number])


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_the_same_whichever_branch_was_right(subject, overlap) -> None:
    with subject.engine(overlap=overlap) as engine:
        asked = [ask(engine, i) for i in range(len(PROMPTS))]
        engine.run()
        assert [engine.tokens(request) for request in asked] == subject.expected
        assert min(engine.accepted(request) for request in asked) > 4
        subject.check(engine)


def test_paths_that_left_the_trunk_come_back_from_every_tier(subject, tmp_path) -> None:
    """Whatever lies in their pages is the state of the tokens that were kept."""
    options = {
        "store": f"file://{tmp_path}/store?max=64MiB", "prefetch_threshold": PAGE,
    }  # fmt: skip
    prompt, answer = PROMPTS[3], subject.expected[3]
    text = [*prompt, *answer, 5, 6, 7]
    with SmallEngine(subject.model) as plain:
        wanted = plain.answer(text, max_tokens=12, temperature=0.0)
    cached = (len(prompt) + len(answer) - 1) // PAGE * PAGE
    with subject.engine(**options) as engine:
        request = ask(engine, 3)
        engine.run()
        assert engine.tokens(request) == answer
        assert engine.accepted(request) > 4
        for tier in ("device", "host"):
            request = engine.ask(text, max_tokens=12, temperature=0.0)
            engine.run()
            assert engine.tokens(request) == wanted
            assert getattr(engine.cached(request), tier) >= cached
            subject.check(engine)
            engine.engine.manager.flush(DEVICE)
    with subject.engine(**options) as engine:
        request = engine.ask(text, max_tokens=12, temperature=0.0)
        engine.run()
        assert engine.tokens(request) == wanted
        assert engine.cached(request).store >= cached
        subject.check(engine)


def test_under_pressure_too(subject) -> None:
    few = 17 * (3 + 1) * 2 * PAGE * 3 * 16 * 4
    with subject.engine(device_bytes=few, typical_tokens=64, max_running=4) as engine:
        asked = [ask(engine, i) for i in range(len(PROMPTS))]
        engine.run()
        assert [engine.tokens(request) for request in asked] == subject.expected
        assert engine.engine.scheduler.counters.preempted > 0
        subject.check(engine)


def test_paths_that_are_not_moved_are_seen(subject, monkeypatch) -> None:
    """So the tests above would have seen it."""
    monkeypatch.setattr("quire.engine.draft.trees.TreeDrafter._move", lambda *_: None)
    with subject.engine() as engine:
        asked = [ask(engine, i) for i in range(len(PROMPTS))]
        engine.run()
        assert [engine.tokens(request) for request in asked] != subject.expected


def test_models_with_windows_and_trees_that_are_too_deep_are_refused(subject, tmp_path) -> None:
    with pytest.raises(ConfigError, match="draft_tokens is 8: it must be at most 7"):
        subject.engine(draft_tokens=8)
    windows = DENSE["gemma3"](tmp_path / "model")
    with pytest.raises(ConfigError, match="layers that see a window"):
        SmallEngine(windows, speculate=f"eagle-tree:{subject.path}")
