"""Attention over pages against the definition: any packing of sequences into a batch, any window,
with sinks and without."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import LAYOUT, NUM_PAGES, PAGE, Sequences, segment, sequences
from quire.engine.attention import open_attention, pack
from quire.engine.attention import torch as torch_attention
from quire.engine.batch import Batch
from quire.errors import ConfigError
from quire.memory.device import DevicePool
from quire.types import page_ids


@settings(max_examples=80, deadline=None)
@given(shapes=sequences, seed=st.integers(0, 1000))
def test_every_packing_gives_what_the_definition_says(shapes, seed):
    """The pool starts full of NaN: whatever an earlier owner left must not come through."""
    Sequences(shapes, seed).check()


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
        Sequences(shapes, seed, window, sinks).check()


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
    Sequences([(n, 1) for n in (0, 1, 3, 4, 7, 8, 31, 40, 100)], 3).check()


def test_keys_and_values_land_in_their_slots_and_nowhere_else():
    case = Sequences([(2, 5)], 1)
    case.attend()
    pages = case.tables[0]
    stored = case.pool.k(0)[pages].flatten(0, 1)[:7].transpose(0, 1)
    assert torch.equal(stored, case.keys[0])
    untouched = [page for page in range(NUM_PAGES) if page not in pages]
    assert torch.isnan(case.pool.k(0)[untouched]).all()


def test_what_is_there_is_read_and_not_written_again():
    """The last token of a prompt whose pages are all there, beside others; one goes on after it."""
    case = Sequences([(7, 1), (2, 1), (3, 1), (9, 5)], 1, there=frozenset({0, 2}))
    case.check()
    for i, page in ((0, 1), (2, 0)):
        stored = case.pool.k(0)[case.tables[i][page], 3]
        assert torch.equal(stored, case.keys[i][:, -1])
    packing = pack(Batch(1, [case._segment(0, 7, 1), case._segment(1, 2, 1)]), PAGE)
    assert packing.slots.tolist() == [-1, 4 * case.tables[1][0] + 2]


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


def test_triton_is_refused_without_cuda():
    with pytest.raises(ConfigError, match="for CUDA: set it to auto"):
        open_attention("triton", DevicePool.allocate(LAYOUT, 2))


def test_auto_is_torch_without_cuda():
    backend = open_attention("auto", DevicePool.allocate(LAYOUT, 2))
    assert isinstance(backend, torch_attention.TorchAttention)
