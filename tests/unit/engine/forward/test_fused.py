"""Our own decoder through fused kernels and graphs, in Triton's interpreter: what transformers
computes. A graph is here a function that is called again; what it reads and writes is the same."""

import functools

import msgspec
import numpy as np
import pytest
import torch

from dense_models import DENSE
from kernel_cases import interpreted
from quire.engine.batch import Batch
from quire.engine.bridge import AttentionBridge
from quire.engine.executor.rank import Rank
from quire.engine.forward.dense import DenseForward, load_dense, num_kv_heads
from quire.engine.runner import ModelRunner
from quire.types import OperationId
from unit.engine.hybrid_rank import PAGE, Hybrid, Sequence, build, poison, stock_model

LENGTH = 40
LARGEST = 5
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=3e-5)


def fused(rank: Rank, directory, dtype=torch.float32) -> Rank:
    """The same pools under another forward."""
    from quire.engine.attention.triton import TritonAttention
    from quire.engine.forward.fused import FusedOps
    from quire.engine.forward.graphs import GraphForward

    model = load_dense(directory, dtype=dtype, device=torch.device("cpu"))
    backends = {
        name: TritonAttention(pools.device, rank.shape.window if name == "window" else 0)
        for name, pools in rank.worker.components.items()
    }
    bridge = AttentionBridge(backends, rank.shape, rank.worker, page_size=PAGE)
    dense = DenseForward(model, bridge, ops=FusedOps(model.spec, num_kv_heads(model)))
    graphs = GraphForward(
        dense, bridge, backends, max_batch=LARGEST, max_pages=32, capture=lambda work: work
    )
    return Rank(rank.worker, ModelRunner(graphs, None), rank.shape, rank.page_size)


class TestInterpreted:
    pytestmark = interpreted

    @pytest.fixture(autouse=True, params=[True, False], ids=["whole", "split"])
    def few_splits(self, request, monkeypatch):
        """As many as fill a GPU would take minutes; so would batches as large."""
        from quire.engine.attention import triton
        from quire.engine.forward import graphs

        monkeypatch.setattr(triton, "num_splits", lambda *_: 2)
        monkeypatch.setattr(triton, "fills", lambda *_: request.param)
        monkeypatch.setattr(graphs, "PIECE", 8)
        monkeypatch.setattr(graphs, "_FEW", 2)
        monkeypatch.setattr(graphs, "_SHORT", (4, 20))
        monkeypatch.setattr(graphs, "_BESIDE", (24,))

    @pytest.fixture(params=["llama_biases", "qwen3_biases", "gemma3"])
    def model(self, request, tmp_path):
        directory = DENSE[request.param](tmp_path, num_hidden_layers=3)
        rank = fused(build(directory), directory)
        poison(rank)
        return Hybrid(rank, stock_model(directory))

    def test_pieces_of_prompts_and_decodes_give_the_logits_of_transformers(self, model):
        """Eagerly, decoding, short by themselves, and short beside decoding."""
        sequences = [Sequence(model, model.tokens(LENGTH, seed=seed)) for seed in range(3)]
        for sizes in ((9, 30, 17), (1, 1, 1), (12, 0, 8), (1, 5, 1), (1, 1, 1)):
            running = [(s, n) for s, n in zip(sequences, sizes, strict=True) if n]
            logits = model.run(*(sequence.segment(size) for sequence, size in running))
            for found, (sequence, _) in zip(logits, running, strict=True):
                close(found, model.expected(sequence.tokens[: sequence.done])[-1])

    @pytest.mark.parametrize("few_splits", [False], indirect=True)
    @pytest.mark.parametrize("model", ["gemma3"], indirect=True)
    def test_tokens_that_are_only_on_the_device_are_followed(self, model):
        """Alone in a graph, and beside a prompt; more of them than the batch before had."""
        sequences = [Sequence(model, model.tokens(11 + i, seed=i)) for i in range(3)]
        for sequence in sequences:
            model.run(sequence.segment(10))
        tokens = torch.tensor([7, sequences[1].tokens[10], sequences[0].tokens[10]])
        segments = [sequence.segment(1) for sequence in sequences]
        unknown = np.zeros(1, "<i4").tobytes()
        for i, follows in ((0, 2), (1, 1)):
            segments[i] = msgspec.structs.replace(segments[i], tokens=unknown, follows=follows)
        forward = model.rank.runner._forward
        expected = [model.expected(s.tokens[:11])[-1] for s in sequences]
        for batch in (segments, [segments[1], prompt(model), segments[0]]):
            with torch.inference_mode():
                logits = forward.logits(Batch(1, list(batch)), tokens)
            for found, part in zip(logits, batch, strict=True):
                if part in segments:
                    close(found, expected[segments.index(part)])

    @pytest.mark.parametrize("few_splits", [False], indirect=True)
    @pytest.mark.parametrize("model", ["gemma3"], indirect=True)
    @pytest.mark.parametrize("few_bytes", [True, False])
    def test_what_is_loaded_is_waited_for_before_a_replay_unless_it_is_long(
        self, model, few_bytes, monkeypatch
    ):
        from quire.engine.forward import graphs

        forward, waited = model.rank.runner._forward, set()

        def wait_layer(op, layer, component="full"):
            waited.add((op, component, layer))

        monkeypatch.setattr(model.rank.worker, "wait_layer", wait_layer)
        monkeypatch.setattr(graphs, "_LOADED_BYTES", 1 << 20 if few_bytes else 0)
        sequence = Sequence(model, model.tokens(12, seed=3))
        model.run(sequence.segment(9))
        segment = msgspec.structs.replace(sequence.segment(3), loads=[OperationId(5)])
        with torch.inference_mode():
            (found,) = forward.logits(Batch(1, [segment]))
        close(found, model.expected(sequence.tokens)[-1])
        assert (forward.replayed is not None) == few_bytes
        every = {(5, place.component, place.layer) for place in forward._bridge.places.values()}
        last = {
            (op, component, max(n for _, c, n in every if c == component))
            for op, component, _ in every
        }
        assert waited == (last if few_bytes else every)


def prompt(model):
    return Sequence(model, model.tokens(9, seed=9)).segment(9)


def test_batch_sizes_end_with_the_largest():
    pytest.importorskip("triton")
    from quire.engine.forward.graphs import batch_sizes

    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 4, 5]
    assert batch_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert batch_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
