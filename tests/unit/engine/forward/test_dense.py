"""Our own decoder computes what transformers computes, for every family, however it is cut up."""

import functools

import pytest
import torch

from dense_models import DENSE, WINDOW
from forward_cases import PIECES, check_greedy, check_half, check_mixed, check_pieces
from quire.engine.batch import Batch
from quire.engine.forward.dense import DenseForward
from unit.engine.hybrid_rank import (
    Hybrid,
    Sequence,
    build,
    poison,
    stock_model,
)

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
@pytest.mark.parametrize("sizes", PIECES, ids=str)
def test_in_one_go_or_in_pieces_the_logits_are_those_of_transformers(model, sizes):
    check_pieces(model, sizes, close)


@every_family
def test_greedy_tokens_are_those_of_transformers_and_vary(model):
    check_greedy(model, 2 * WINDOW + 3)


@every_family
def test_decodes_pieces_of_prompts_and_continued_prefixes_in_one_batch(model):
    check_mixed(model, close)


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
    check_half(directories(name), Hybrid(*ranks(name)), "bfloat16")
