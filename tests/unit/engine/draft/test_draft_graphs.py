"""A draft head in graphs, in Triton's interpreter: proposals and answers of the eager way.

A graph is here a function that is called again; what it reads and writes is the same.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from dense_models import DENSE
from eagle_models import Watching, chain, read_head, teacher_of, write_head
from kernel_cases import interpreted
from small_engine import SmallEngine

pytestmark = interpreted
AHEAD = 3


@pytest.fixture(autouse=True)
def in_graphs(monkeypatch) -> None:
    """As on CUDA, but smaller."""
    from quire.engine.attention import triton
    from quire.engine.attention.triton import TritonAttention
    from quire.engine.draft.graph_drafter import GraphDrafter
    from quire.engine.executor import rank
    from quire.engine.forward import assembly, graphs
    from quire.engine.forward.dense import DenseForward, num_kv_heads
    from quire.engine.forward.fused import FusedOps
    from quire.engine.forward.taps import Taps

    monkeypatch.setattr(triton, "num_splits", lambda *_: 2)
    monkeypatch.setattr(triton, "fills", lambda *_: False)
    monkeypatch.setattr(graphs, "_FEW", 2)
    monkeypatch.setattr(graphs, "_SHORT", (16,))
    monkeypatch.setattr(graphs, "_BESIDE", ())
    monkeypatch.setattr(graphs, "batch_sizes", lambda _largest: [1, 2])
    monkeypatch.setattr(assembly, "_has_kernels", lambda _model: True)
    monkeypatch.setattr(rank, "open_attention", lambda _n, pool, win: TritonAttention(pool, win))

    def open_dense(model, bridge, backends, _all_reduce, *, limits, progress, taps):
        tapped = Taps(taps, model.weights.embedding, 64)
        ops = FusedOps(model.spec, num_kv_heads(model))
        return graphs.GraphForward(
            DenseForward(model, bridge, ops=ops, taps=tapped),
            bridge,
            backends,
            max_batch=2,
            max_pages=32,
            capture=lambda work: work,
            max_drafts=limits.max_drafts,
        )

    def replayed(drafter, forward, bridge, backends, max_tokens):
        full = backends["full"]
        return GraphDrafter(drafter, forward, bridge, full, max_tokens=max_tokens)

    monkeypatch.setattr(rank, "open_dense", open_dense)
    monkeypatch.setattr(rank, "replayed", replayed)


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.long)])
def test_proposals_and_answers_are_those_without_graphs(kind, tmp_path) -> None:
    model = DENSE[kind](tmp_path / "model")
    teacher = teacher_of(model)
    path = write_head(teacher, tmp_path / "head")
    head = read_head(teacher, path)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7, 1, 8, 2, 8, 1]]
    torch.manual_seed(0)
    with SmallEngine(model, speculate=f"eagle:{path}", draft_tokens=AHEAD, max_running=2) as engine:
        watching = engine.engine.scheduler.drafting.speculation = Watching(AHEAD)
        runner = engine.engine._executor._rank.runner
        asked = [engine.ask(p, max_tokens=4 + i, temperature=0.0) for i, p in enumerate(prompts)]
        engine.run()
        assert runner._forward.replayed is not None, "nothing was replayed"
        answers = [engine.tokens(request) for request in asked]
        watching.check(lambda text, count: chain(teacher, head, text, count))
    for prompt, answer in zip(prompts, answers, strict=True):
        seen = teacher.see(torch.tensor([[*prompt, *answer]]), (0, 1, 1)).logits[0]
        assert answer == seen[len(prompt) - 1 : -1].argmax(-1).tolist()
