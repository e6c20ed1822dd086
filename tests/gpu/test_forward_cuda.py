"""Our own decoder on CUDA, fused and in graphs: what transformers computes, for every family."""

import functools

import msgspec
import numpy as np
import pytest
import torch

from dense_models import DENSE, WINDOW
from quire.engine.batch import Batch
from quire.engine.config import ForwardKind
from unit.engine.hybrid_rank import PAGE, Hybrid, Sequence, build, poison, stock_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
LENGTH = 90  # several windows
LARGEST = 6
every_family = pytest.mark.parametrize("name", DENSE)
with_and_without_graphs = pytest.mark.parametrize("graph_batch", [LARGEST, 0])

close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
"""In float32, of logits up to about 10: see tests/unit/engine/forward."""


class OnCuda(Hybrid):
    """Beside transformers' own model, which stays on the CPU."""

    def run(self, *segments):
        return super().run(*segments).cpu()


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return functools.cache(lambda name: DENSE[name](tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def ranks(directories):
    @functools.cache
    def load(name, graph_batch):
        rank = build(directories(name), device="cuda", graph_batch=graph_batch)
        return rank, stock_model(directories(name))

    return load


@pytest.fixture
def model(name, graph_batch, ranks):
    rank, stock = ranks(name, graph_batch)
    poison(rank)
    expected = "GraphForward" if graph_batch else "DenseForward"
    assert type(rank.runner._forward).__name__ == expected
    return OnCuda(rank, stock)


@every_family
@with_and_without_graphs
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
@with_and_without_graphs
def test_decodes_pieces_of_prompts_and_continued_prefixes_in_one_batch(model):
    first = Sequence(model, model.tokens(LENGTH, seed=1), slot=0)
    second = Sequence(model, model.tokens(LENGTH, seed=2), slot=1)
    model.run(first.segment(40), second.segment(61))
    branch = first.branch(model.tokens(33, seed=3), slot=2)
    new = Sequence(model, model.tokens(17, seed=4), slot=3)
    for sizes in ([1, 30, 16], [9, 1, 1], [1, 1, 0], [1, 1, 0]):
        running = [(s, n) for s, n in zip([second, branch, new], sizes, strict=True) if n]
        logits = model.run(*(sequence.segment(size) for sequence, size in running))
        for found, (sequence, _) in zip(logits, running, strict=True):
            close(found, model.expected(sequence.tokens[: sequence.done])[-1])


@every_family
@with_and_without_graphs
def test_tokens_that_are_only_on_the_device_are_followed(model):
    sequences = [Sequence(model, model.tokens(2 * WINDOW + i, seed=i)) for i in range(LARGEST - 1)]
    for sequence in sequences:
        model.run(sequence.segment(2 * WINDOW - 1))
    drawn = torch.tensor([s.tokens[2 * WINDOW - 1] for s in reversed(sequences)], device="cuda")
    unknown = np.zeros(1, "<i4").tobytes()
    segments = [
        msgspec.structs.replace(s.segment(1), tokens=unknown, follows=len(sequences) - 1 - i)
        for i, s in enumerate(sequences)
    ]
    with torch.inference_mode():
        logits = model.rank.runner._forward.logits(Batch(1, segments), drawn).cpu()
    for found, sequence in zip(logits, sequences, strict=True):
        close(found, model.expected(sequence.tokens[: sequence.done])[-1])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@with_and_without_graphs
def test_nothing_waits_for_the_device(model):
    """Every length of batch has been seen before: kernels are compiled then."""
    sequences = [Sequence(model, model.tokens(LENGTH, seed=i)) for i in range(3)]
    for _ in range(2):
        model.run(*(sequence.segment(8) for sequence in sequences))
        model.run(*(sequence.segment(1) for sequence in sequences))
    batches = [Batch(1, [s.segment(size) for s in sequences]) for size in (8, 1)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            model.rank.runner.logits(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("dtype", "name"), [("float16", "llama"), *(("bfloat16", name) for name in DENSE)]
)
def test_in_half_precision_it_is_as_near_to_the_truth_as_transformers(
    name, dtype, directories, ranks
):
    """The rule: the error against float32 is at most one and a half times that of transformers'
    modules in the same dtype, over all tokens of a text; fed page by page, then token by token."""
    truth = OnCuda(*ranks(name, 0))
    tokens = truth.tokens(LENGTH)
    expected = truth.expected(tokens)
    errors = {}
    for kind in (ForwardKind.DENSE, ForwardKind.TRANSFORMERS):
        graph_batch = LARGEST if kind is ForwardKind.DENSE else 0
        rank = build(
            directories(name), forward=kind, dtype=dtype, device="cuda", graph_batch=graph_batch
        )
        poison(rank)
        half = OnCuda(rank, None)
        sequence = Sequence(half, tokens)
        sizes = [PAGE] * (LENGTH // PAGE // 2)
        sizes += [1] * (LENGTH - sum(sizes))
        found = torch.cat([half.run(sequence.segment(size)) for size in sizes])
        ends = np.cumsum(sizes) - 1
        errors[kind] = (found.float() - expected[ends]).square().mean().sqrt()
        rank.close()
    print(f"{name} {dtype}: {errors}")
    assert errors[ForwardKind.DENSE] <= 1.5 * errors[ForwardKind.TRANSFORMERS]
