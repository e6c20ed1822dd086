"""Attention over pages against the definition, for any packing of sequences into a batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.attention import open_attention, pack
from quire.engine.batch import Batch, Segment
from quire.errors import ConfigError
from quire.memory.device import DevicePool
from quire.memory.layout import PageLayout
from quire.types import RequestId, page_ids

PAGE, HEADS, KV, DIM = 4, 6, 2, 8
LAYOUT = PageLayout("full", 1, KV, DIM, "float32", PAGE)
NUM_PAGES = 256
SCALING = 0.3

sequences = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6
)  # (tokens before, tokens computed now)


def segment(number: int, start: int, count: int, pages: list[int]) -> Segment:
    tokens = np.zeros(count, dtype="<i4").tobytes()
    return Segment(RequestId(f"r{number}"), tokens, start, page_ids(pages), [], None)


class Sequences:
    """Random keys, values and queries, their pages scattered over a pool full of NaN."""

    def __init__(self, shapes: list[tuple[int, int]], seed: int) -> None:
        torch.manual_seed(seed)
        self.pool = DevicePool.allocate(LAYOUT, NUM_PAGES)
        for plane in self.pool.planes(0):
            plane.fill_(float("nan"))
        free = iter(np.random.default_rng(seed).permutation(NUM_PAGES).tolist())
        self.shapes = shapes
        self.tables = [
            [next(free) for _ in range(-(-(start + count) // PAGE))] for start, count in shapes
        ]
        self.keys = [torch.randn(KV, start + count, DIM) for start, count in shapes]
        self.values = [torch.randn(KV, start + count, DIM) for start, count in shapes]
        self.queries = [torch.randn(HEADS, count, DIM) for _, count in shapes]

    def attend(self) -> list[torch.Tensor]:
        """First what came before, one token at a time, then the batch under test."""
        backend = open_attention("torch", self.pool)
        for i, (start, _) in enumerate(self.shapes):
            if start:
                self._run(backend, [(i, 0, start)])
        return self._run(backend, [(i, *shape) for i, shape in enumerate(self.shapes)])

    def _run(self, backend, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        batch = Batch(1, [segment(i, start, n, self.tables[i]) for i, start, n in parts])
        plan = backend.plan(pack(batch, PAGE))
        query = torch.cat(
            [
                self.queries[i]
                if start + n == self.keys[i].shape[1]
                else torch.zeros(HEADS, n, DIM)
                for i, start, n in parts
            ],
            1,
        )
        key = torch.cat([self.keys[i][:, start : start + n] for i, start, n in parts], 1)
        value = torch.cat([self.values[i][:, start : start + n] for i, start, n in parts], 1)
        output = backend.attend(plan, 0, query, key, value, scaling=SCALING)
        return list(output.split([n for _, _, n in parts]))

    def _query(self, i: int, start: int, count: int) -> torch.Tensor:
        under_test = (start, count) == self.shapes[i]
        return self.queries[i] if under_test else torch.zeros(HEADS, count, DIM)

    def expected(self, i: int) -> torch.Tensor:
        """The definition, in float64."""
        start, count = self.shapes[i]
        keys = self.keys[i].double().repeat_interleave(HEADS // KV, 0)
        values = self.values[i].double().repeat_interleave(HEADS // KV, 0)
        scores = self.queries[i].double() @ keys.transpose(1, 2) * SCALING
        hidden = torch.arange(start + count) > torch.arange(start, start + count)[:, None]
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(0, 1)


@settings(max_examples=80, deadline=None)
@given(shapes=sequences, seed=st.integers(0, 1000))
def test_every_packing_gives_what_the_definition_says(shapes, seed):
    """The pool starts full of NaN: whatever an earlier owner left must not come through."""
    case = Sequences(shapes, seed)
    for i, output in enumerate(case.attend()):
        torch.testing.assert_close(output.double(), case.expected(i), rtol=1e-5, atol=1e-5)


def test_decodes_of_many_lengths_do_not_disturb_each_other():
    case = Sequences([(n, 1) for n in (0, 1, 3, 4, 7, 8, 31, 40, 100)], 3)
    for i, output in enumerate(case.attend()):
        torch.testing.assert_close(output.double(), case.expected(i), rtol=1e-5, atol=1e-5)


def test_keys_and_values_land_in_their_slots_and_nowhere_else():
    case = Sequences([(2, 5)], 1)
    case.attend()
    pages = case.tables[0]
    stored = case.pool.k(0)[pages].flatten(0, 1)[:7].transpose(0, 1)
    assert torch.equal(stored, case.keys[0])
    untouched = [page for page in range(NUM_PAGES) if page not in pages]
    assert torch.isnan(case.pool.k(0)[untouched]).all()


def test_packing_names_tokens_positions_and_slots():
    batch = Batch(1, [segment(0, 3, 3, [9, 5]), segment(1, 0, 1, [2])])
    packing = pack(batch, PAGE)
    assert packing.positions.tolist() == [3, 4, 5, 0]
    assert packing.slots.tolist() == [9 * 4 + 3, 5 * 4, 5 * 4 + 1, 2 * 4]
    assert packing.fresh.tolist() == [5, 2]


def test_a_page_filled_by_the_batch_is_not_fresh():
    assert pack(Batch(1, [segment(0, 0, 8, [1, 2])]), PAGE).fresh.tolist() == []
    assert pack(Batch(1, [segment(0, 5, 1, [1, 2])]), PAGE).fresh.tolist() == []


def test_a_page_table_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="1 pages for 2"):
        pack(Batch(1, [segment(0, 0, 5, [1])]), PAGE)


def test_an_unknown_backend_is_named():
    with pytest.raises(ConfigError, match="'magic'"):
        open_attention("magic", DevicePool.allocate(LAYOUT, 2))
