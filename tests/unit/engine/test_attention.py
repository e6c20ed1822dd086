"""Attention over pages against the definition: any packing of sequences into a batch, any window,
with sinks and without."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.attention import open_attention, pack
from quire.engine.attention import torch as torch_attention
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


def window_segment(number: int, start: int, count: int, pages: list[int], window: int) -> Segment:
    """One that has no more pages than its queries see."""
    first = max(0, start - window + 1) // PAGE
    seen = segment(number, start, count, [])
    return msgspec.structs.replace(seen, window=page_ids(pages[first:]), window_first=first)


class Sequences:
    """Random keys, values and queries, their pages scattered over a pool full of NaN."""

    def __init__(
        self, shapes: list[tuple[int, int]], seed: int, window: int = 0, sinks: bool = False
    ) -> None:
        torch.manual_seed(seed)
        self.window = window
        self.sinks = torch.randn(HEADS) * 2 if sinks else None
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
        backend = open_attention("torch", self.pool, self.window)
        for i, (start, _) in enumerate(self.shapes):
            if start:
                self._run(backend, [(i, 0, start)])
        return self._run(backend, [(i, *shape) for i, shape in enumerate(self.shapes)])

    def _run(self, backend, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        batch = Batch(1, [self._segment(*part) for part in parts])
        plan = backend.plan(pack(batch, PAGE, self.window))
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
        output = backend.attend(plan, 0, query, key, value, scaling=SCALING, sinks=self.sinks)
        return list(output.split([n for _, _, n in parts]))

    def _segment(self, i: int, start: int, count: int) -> Segment:
        if self.window:
            return window_segment(i, start, count, self.tables[i], self.window)
        return segment(i, start, count, self.tables[i])

    def _query(self, i: int, start: int, count: int) -> torch.Tensor:
        under_test = (start, count) == self.shapes[i]
        return self.queries[i] if under_test else torch.zeros(HEADS, count, DIM)

    def expected(self, i: int) -> torch.Tensor:
        """The definition, in float64."""
        start, count = self.shapes[i]
        keys = self.keys[i].double().repeat_interleave(HEADS // KV, 0)
        values = self.values[i].double().repeat_interleave(HEADS // KV, 0)
        scores = self.queries[i].double() @ keys.transpose(1, 2) * SCALING
        keys_at, queries_at = (
            torch.arange(start + count),
            torch.arange(start, start + count)[:, None],
        )
        hidden = keys_at > queries_at
        if self.window:
            hidden |= keys_at <= queries_at - self.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, count, 1)
            shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        return (shares @ values).transpose(0, 1)


@settings(max_examples=80, deadline=None)
@given(shapes=sequences, seed=st.integers(0, 1000))
def test_every_packing_gives_what_the_definition_says(shapes, seed):
    """The pool starts full of NaN: whatever an earlier owner left must not come through."""
    case = Sequences(shapes, seed)
    for i, output in enumerate(case.attend()):
        torch.testing.assert_close(output.double(), case.expected(i), rtol=1e-5, atol=1e-5)


@settings(max_examples=120, deadline=None)
@given(
    shapes=sequences,
    seed=st.integers(0, 1000),
    window=st.sampled_from([0, 1, 3, 4, 9, 24]),
    sinks=st.booleans(),
    block=st.sampled_from([1, 5, 512]),
)
def test_windows_and_sinks_give_what_the_definition_says(shapes, seed, window, sinks, block):
    """Only the pages that may be seen are there; prompts are cut into blocks of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "_MIN_BLOCK", block)
        case = Sequences(shapes, seed, window, sinks)
        for i, output in enumerate(case.attend()):
            torch.testing.assert_close(output.double(), case.expected(i), rtol=1e-5, atol=1e-5)


def test_only_pages_of_the_window_are_gathered():
    case = Sequences([(100, 1), (90, 3)], 3, window=9)
    backend = open_attention("torch", case.pool, 9)
    batch = Batch(1, [segment(0, 100, 1, []), segment(1, 90, 3, [])])
    whole = [msgspec.structs.replace(s, window=page_ids(case.tables[i])) for i, s in
             enumerate(batch.segments)]  # fmt: skip
    plan = backend.plan(pack(Batch(1, whole), PAGE, 9))
    assert plan.decodes[0].pages.tolist() == [case.tables[0][23:26]]
    assert plan.prompts[0].pages.tolist() == case.tables[1][20:24]


def test_a_window_table_that_begins_too_late_is_refused():
    late = msgspec.structs.replace(segment(0, 20, 1, []), window=page_ids([1, 2]), window_first=4)
    assert pack(Batch(1, [late]), PAGE, 5).slots.tolist() == [2 * 4]
    with pytest.raises(ValueError, match="too late"):
        pack(Batch(1, [late]), PAGE, 6)


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
