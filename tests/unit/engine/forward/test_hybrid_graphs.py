"""Models of transformers in graphs, in Triton's interpreter: what transformers itself computes.

A graph is here a function that is called again; what it reads and writes is the same.
"""

import functools

import pytest
import torch

from hybrid_models import TINY
from kernel_cases import interpreted
from quire.engine.bridge import AttentionBridge
from quire.engine.executor.rank import Rank
from quire.engine.forward.transformers import TransformersForward
from quire.engine.recurrent_states import RecurrentStates
from quire.engine.runner import ModelRunner
from unit.engine.hybrid_rank import PAGE, Hybrid, Sequence, build, poison, stock_model

pytestmark = interpreted
LENGTH = 24
close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def in_graphs(rank: Rank) -> Rank:
    """The same model and pools; attention in Triton."""
    from quire.engine.attention.triton import TritonAttention
    from quire.engine.forward.graphs import GraphForward

    inner, shape = rank.runner._forward, rank.shape
    assert isinstance(inner, TransformersForward)
    pools = {name: found.device for name, found in rank.worker.components.items()}
    slots = pools.pop("recurrent", None)
    windows = {"full": 0, "window": shape.window}
    backends = {name: TritonAttention(pool, windows[name]) for name, pool in pools.items()}
    bridge = AttentionBridge(backends, shape, rank.worker, page_size=PAGE)
    states = None
    if slots is not None:
        wait = functools.partial(bridge.wait, "recurrent")
        states = RecurrentStates(slots, shape.state_layout("float32"), shape.recurrent_layers, wait)
    forward = TransformersForward(inner._model, bridge, states=states)
    graphs = GraphForward(
        forward, bridge, backends, max_batch=4, max_pages=32, capture=lambda work: work
    )
    return Rank(rank.worker, ModelRunner(graphs, None), shape, rank.page_size)


@pytest.fixture
def small_graphs(monkeypatch):
    from quire.engine.attention import triton
    from quire.engine.forward import graphs

    monkeypatch.setattr(triton, "num_splits", lambda *_: 2)
    monkeypatch.setattr(graphs, "PIECE", 8)
    monkeypatch.setattr(graphs, "_SHORT", (8,))


@pytest.fixture(params=["falcon_h1", "qwen3_next", "lfm2", "gpt_oss"])
def model(request, tmp_path, small_graphs):
    directory = TINY[request.param](tmp_path)
    rank = in_graphs(build(directory))
    poison(rank)
    return Hybrid(rank, stock_model(directory))


def test_decoding_in_graphs_gives_the_logits_of_transformers(model):
    """Three sequences in a graph for four; with a snapshot saved and restored in between."""
    is_recurrent = bool(model.shape.recurrent_layers)
    sequences = [Sequence(model, model.tokens(LENGTH, seed=i), slot=i + 2) for i in range(3)]
    for sequence, size in zip(sequences, (16, 13, 5), strict=True):
        model.run(sequence.segment(size))
    replayed = count_replays(model)
    for step in range(4):
        moves = {1: {"save": 9}, 2: {"restore": 9}}.get(step, {}) if is_recurrent else {}
        segments = [
            sequence.segment(1, **(moves if i == 0 else {})) for i, sequence in enumerate(sequences)
        ]
        for found, sequence in zip(model.run(*segments), sequences, strict=True):
            close(found, model.expected(sequence.tokens[: sequence.done])[-1])
    assert len(replayed) == (2 if is_recurrent else 4)


def count_replays(model: Hybrid) -> list[int]:
    graphs, counted = model.rank.runner._forward, []

    def counting(replay):
        def replay_and_count():
            counted.append(1)
            replay()

        return replay_and_count

    graphs._replays = {kind: counting(replay) for kind, replay in graphs._replays.items()}
    return counted
