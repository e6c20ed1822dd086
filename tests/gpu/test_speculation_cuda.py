"""Proposals on CUDA, in graphs: the answers without, and what the head computes by another way."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from dense_models import DENSE, VOCABULARY
from eagle_models import Branching, Watching, chain, read_head, teacher_of, write_head
from small_engine import SmallEngine
from speculating import Eager, FixedPrices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
AHEAD = 3
CUDA = {"device": "cuda", "dtype": "float32", "max_running": 4, "device_bytes": 16 << 20}
PROMPTS = [[(i * 37 + j * j * (i + 3)) % VOCABULARY for j in range(9 + 11 * i)] for i in range(4)]
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logprobs": 2},
]


def answers(engine: SmallEngine) -> list[list[int]]:
    asked = [
        engine.ask(prompt, max_tokens=24, **params)
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    engine.run()
    return [engine.tokens(request) for request in asked]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_head_proposes_the_same_and_changes_nothing(kind, graphs, tmp_path) -> None:
    model = DENSE[kind](tmp_path / "model")
    teacher = teacher_of(model)
    path = write_head(teacher, tmp_path / "head")
    head = read_head(teacher, path)
    with SmallEngine(model, **CUDA) as plain:
        expected = answers(plain)
    options = CUDA | {"cuda_graphs": graphs}
    with SmallEngine(model, speculate=f"eagle:{path}", draft_tokens=AHEAD, **options) as engine:
        watching = engine.engine.scheduler.drafting.speculation = Watching(AHEAD)
        assert answers(engine) == expected
        watching.check(lambda text, count: chain(teacher, head, text, count))


@pytest.mark.parametrize("graphs", [True, False])
def test_trees_change_nothing_whichever_branch_was_right(graphs, tmp_path) -> None:
    model = DENSE["llama"](tmp_path / "model")
    teacher = teacher_of(model)
    path = write_head(teacher, tmp_path / "head")
    head = read_head(teacher, path)
    with SmallEngine(model, **CUDA) as plain:
        expected = answers(plain)
    known = {tuple(p): answer for p, answer in zip(PROMPTS, expected, strict=True)}
    options = CUDA | {"cuda_graphs": graphs, "speculate": f"eagle-tree:{path}"}
    with SmallEngine(model, draft_tokens=AHEAD, **options) as engine:
        trees = Branching(AHEAD, known, VOCABULARY)
        engine.engine.scheduler.drafting.speculation = trees
        assert answers(engine) == expected
        assert sum(trees.counters.accepted) > 10
        for text, tokens in trees.seen:
            levels = len(tokens) // 2
            assert tokens[:levels] == chain(teacher, head, text, levels)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_is_looked_up_changes_nothing(kind, tmp_path) -> None:
    model = DENSE[kind](tmp_path / "model")
    with SmallEngine(model, **CUDA) as plain:
        expected = answers(plain)
    with SmallEngine(model, speculate="ngram", draft_tokens=AHEAD, **CUDA) as engine:
        speculation = engine.engine.scheduler.drafting.speculation
        known = [[*p, *a] for p, a in zip(PROMPTS, expected, strict=True)]
        speculation.new_proposer = lambda tokens: _Half(tokens, known)
        speculation.prices, speculation.new_length = FixedPrices(), Eager
        assert answers(engine) == expected
        assert sum(speculation.counters.accepted) > 10


class _Half:
    """Every other proposal is right."""

    def __init__(self, tokens, known: list[list[int]]) -> None:
        self._tokens = [int(token) for token in tokens]
        self._known = known

    def extend(self, tokens) -> None:
        self._tokens += tokens

    def propose(self, max_tokens: int) -> list[int]:
        count = len(self._tokens)
        text = next((t for t in self._known if t[:count] == self._tokens), self._tokens)
        right = text[count : count + max_tokens]
        return right if count % 2 else [(token + 1) % VOCABULARY for token in right]
