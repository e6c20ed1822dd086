"""Attention through our kernels, in Triton's interpreter; and how long prompts are cut up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import Sequences, sequences
from kernel_cases import interpreted
from quire.engine.attention import prefixed
from quire.engine.attention.base import Heads
from quire.engine.attention.prefixed import AttentionWays, by_definition


def cut_into(length: int, smallest: int) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixed, "_MIN_PIECE", smallest)
        return list(AttentionWays(torch.device("cuda"), torch.bfloat16).cut(length))


def test_lengths_are_cut_into_few_different_ones_and_a_rest():
    assert cut_into(30000, 2048) == [8192, 8192, 8192, 2048, 2048, 1328]
    assert cut_into(8192, 2048) == [8192]
    assert cut_into(2047, 2048) == [2047]
    assert cut_into(0, 2048) == []


def test_what_a_way_refuses_is_done_by_the_next_and_not_tried_again():
    tried = []

    def refuses(*_work):
        tried.append(1)
        raise RuntimeError("not today")

    ways = AttentionWays(torch.device("cpu"), torch.float32)
    ways._fast, ways._others = [refuses], [by_definition]
    query, key = torch.randn(2, 2048, 4), torch.randn(1, 2048, 4)
    for _ in range(2):
        part = ways(Heads(query, key, key), False, 1.0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, *(key.expand(2, -1, -1),) * 2, scale=1.0
    )
    torch.testing.assert_close(part.out, expected)
    assert tried == [1]
    assert list(ways.cut(5000)) == [5000]


@pytest.fixture(autouse=True)
def few_scores(monkeypatch):
    """By the definition, but in many blocks of queries."""
    monkeypatch.setattr(prefixed, "_MAX_SCORES", 100)


class TestInterpreted:
    pytestmark = interpreted

    @settings(max_examples=12, deadline=None)
    @given(
        shapes=sequences,
        seed=st.integers(0, 1000),
        window=st.sampled_from([0, 0, 1, 3, 9, 24]),
        sinks=st.booleans(),
        short=st.sampled_from([1, 4, 128]),
    )
    def test_every_packing_gives_what_the_definition_says(self, shapes, seed, window, sinks, short):
        from quire.engine.attention import triton

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton, "_SHORT", short)
            patch.setattr(triton, "num_splits", lambda *_: 2)
            Sequences(shapes, seed, window, sinks, backend=triton.TritonAttention).check()

    @pytest.mark.parametrize("window", [0, 100])
    def test_long_sequences_are_split(self, window):
        from quire.engine.attention import triton

        shapes = [(200, 1), (3, 1), (150, 5), (230, 1)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton, "num_splits", lambda *_: 2)
            Sequences(shapes, 3, window, True, backend=triton.TritonAttention).check()

    def test_what_is_there_is_read_and_not_written_again(self):
        from quire.engine.attention import triton

        shapes, there = [(7, 1), (2, 1), (3, 1), (9, 5)], frozenset({0, 2})
        case = Sequences(shapes, 1, backend=triton.TritonAttention, there=there)
        case.check()
        for i, page in ((0, 1), (2, 0)):
            stored = case.pool.k(0)[case.tables[i][page], 3]
            assert torch.equal(stored, case.keys[i][:, -1])

    @settings(max_examples=8, deadline=None)
    @given(shapes=sequences, seed=st.integers(0, 1000), sinks=st.booleans())
    def test_chunks_in_pieces_on_prefixes_in_pieces(self, shapes, seed, sinks):
        from quire.engine.attention import triton

        def backend(pool, window):
            found = triton.TritonAttention(pool, window)
            found._parts._fast = [by_definition]
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefixed, "_MIN_PIECE", 2)
            patch.setattr(triton, "_SHORT", 1)
            Sequences(shapes, seed, 0, sinks, backend=backend).check()
