"""Our own decoder computes what transformers computes, for every family, however it is cut up."""

import functools

import pytest
import torch

from dense_models import DENSE, WINDOW
from quire.engine.batch import Batch
from quire.engine.config import ForwardKind
from quire.engine.forward.dense import DenseForward
from unit.engine.hybrid_rank import (
    PAGE,
    Hybrid,
    Sequence,
    build,
    poison,
    stock_model,
)

LENGTH = 90  # several windows
every_family = pytest.mark.parametrize("name", DENSE)

close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=3e-5)
"""In float32, of logits up to about 10. Measured: 6e-6, what another order of sums comes to; the
least that leaving something out of the computation changes is 1.4e-4 (the other kind of gelu)."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return functools.cache(lambda name: DENSE[name](tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def ranks(directories):
    @functools.cache
    def load(name):
        return build(directories(name)), stock_model(directories(name))

    return load


@pytest.fixture
def model(name, ranks):
    """Beside transformers' own; every page holds what is no number until it is written."""
    rank, stock = ranks(name)
    poison(rank)
    assert isinstance(rank.runner._forward, DenseForward)
    return Hybrid(rank, stock)


@every_family
@pytest.mark.parametrize("sizes", [(LENGTH,), (32,), (7,), (1,), (40, 1, 1, 3)], ids=str)
def test_in_one_go_or_in_pieces_the_logits_are_those_of_transformers(model, sizes):
    sequence = Sequence(model, model.tokens(LENGTH))
    expected = model.expected(sequence.tokens)
    for i in range(LENGTH):
        size = min(sizes[i % len(sizes)], LENGTH - sequence.done)
        if not size:
            break
        (logits,) = model.run(sequence.segment(size))
        close(logits, expected[sequence.done - 1])


@every_family
def test_greedy_tokens_are_those_of_transformers_and_vary(model):
    sequence = Sequence(model, model.tokens(2 * WINDOW + 3))
    answer = []
    size = len(sequence.tokens)
    for _ in range(WINDOW):
        (logits,) = model.run(sequence.segment(size))
        answer.append(int(logits.argmax()))
        expected = int(model.expected(sequence.tokens)[-1].argmax())
        assert answer[-1] == expected
        sequence.tokens.append(answer[-1])
        size = 1
    assert len(set(answer)) > 3


@every_family
def test_decodes_pieces_of_prompts_and_continued_prefixes_in_one_batch(model):
    first = Sequence(model, model.tokens(LENGTH, seed=1), slot=0)
    second = Sequence(model, model.tokens(LENGTH, seed=2), slot=1)
    model.run(first.segment(40), second.segment(61))
    branch = first.branch(model.tokens(33, seed=3), slot=2)  # whose window goes on, not first's
    new = Sequence(model, model.tokens(17, seed=4), slot=3)
    everybody = [second, branch, new]
    for sizes in ([1, 30, 16], [9, 1, 1], [1, 1, 0]):
        running = [(s, n) for s, n in zip(everybody, sizes, strict=True) if n]
        logits = model.run(*(sequence.segment(size) for sequence, size in running))
        for found, (sequence, _) in zip(logits, running, strict=True):
            close(found, model.expected(sequence.tokens[: sequence.done])[-1])


@pytest.mark.parametrize("name", ["llama"])
def test_logits_are_of_the_segments_that_want_a_token_only(model):
    wanted, other = (Sequence(model, model.tokens(9, seed)).segment(9) for seed in (1, 2))
    quiet = type(other)(**{f: getattr(other, f) for f in other.__struct_fields__} | {"row": None})
    expected = model.expected(model.tokens(9, 1))[-1]
    for batch in ([wanted, quiet], [quiet, wanted]):
        (logits,) = model.rank.runner.logits(Batch(1, batch))
        close(logits, expected)
    assert not len(model.rank.runner.logits(Batch(2, [quiet])))
    assert model.rank.runner.run(Batch(3, [quiet])).results[0].sampled is None


@every_family
def test_in_half_precision_it_is_as_near_to_the_truth_as_transformers(name, directories, ranks):
    """The rule: the error against float32 is at most one and a half times that of transformers'
    modules in the same dtype, over all tokens of a text."""
    truth = Hybrid(*ranks(name))
    tokens = truth.tokens(LENGTH)
    expected = truth.expected(tokens)
    errors = {}
    for kind in (ForwardKind.DENSE, ForwardKind.TRANSFORMERS):
        half = Hybrid(build(directories(name), forward=kind, dtype="bfloat16"), None)
        sequence = Sequence(half, tokens)
        found = torch.cat([half.run(sequence.segment(PAGE)) for _ in range(LENGTH // PAGE)])
        errors[kind] = (found.float() - expected[PAGE - 1 :: PAGE]).square().mean().sqrt()
        half.rank.close()
    assert errors[ForwardKind.DENSE] <= 1.5 * errors[ForwardKind.TRANSFORMERS]
