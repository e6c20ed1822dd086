"""The kernels in Triton's interpreter. bfloat16 is left to tests/gpu: it cannot multiply those."""

import numpy as np
import pytest
import torch

from kernel_cases import (
    Where,
    check_activation,
    check_append,
    check_decode,
    check_merge,
    check_norms,
    check_turn,
    interpreted,
)

pytestmark = interpreted


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def where(request):
    return Where("cpu", request.param)


@pytest.mark.parametrize(("rows", "size"), [(1, 48), (3, 64), (2, 1152)])
def test_norms(where, rows, size):
    check_norms(where, rows, size)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_activations(where, activation):
    check_activation(where, activation, 2, 1100)


@pytest.mark.parametrize(("kv", "dim"), [(1, 16), (3, 40)])
def test_append(where, kv, dim):
    check_append(where, kv, dim)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize("shape", [(1, 2, 1, 16), (5, 6, 3, 40), (256, 2, 1, 16)])
def test_turn(where, shape, normed, appends):
    check_turn(where, *shape, normed=normed, appends=appends)


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 256])
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_over_pages_of_any_size(where, page_size, splits):
    check_decode(where, [1, 0, 64, 65, 200], page_size=page_size, splits=splits)


@pytest.mark.parametrize(("window", "sinks"), [(0, True), (1, False), (50, True), (64, False)])
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_with_windows_and_sinks(where, window, sinks, splits):
    check_decode(where, [1, 63, 0, 64, 130], window=window, sinks=sinks, splits=splits)


def test_a_long_sequence_among_short_ones_is_split_and_they_are_not():
    from quire.engine.kernels.decode import num_splits, split_tokens

    lengths = np.array([1000] * 63 + [32000], dtype=np.int32)
    split = split_tokens(lengths, 0, max_splits=num_splits(64, 8), num_kv_heads=8)
    assert 1024 <= split <= 32000 / 4
    even = np.full(64, 3500, dtype=np.int32)
    assert split_tokens(even, 0, max_splits=num_splits(64, 8), num_kv_heads=8) >= 3500
    assert split_tokens(even[:1], 0, max_splits=num_splits(1, 8), num_kv_heads=8) == 64
    assert split_tokens(even[:1], 100, max_splits=1, num_kv_heads=8) >= 128
    assert split_tokens(even[:1] * 0, 0, max_splits=1, num_kv_heads=8) == 64


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 33])
@pytest.mark.parametrize("length", [5000, 32768, 131072])
def test_sequences_that_are_alike_are_split_into_no_more_than_fill_the_machine(count, length):
    """One program too many is computed when all the others are done."""
    from quire.engine.kernels.decode import _PROGRAMS, num_splits, split_tokens

    lengths = np.full(count, length, dtype=np.int32) - np.arange(count, dtype=np.int32)
    split = split_tokens(lengths, 0, max_splits=num_splits(count, 8), num_kv_heads=8)
    num_programs = sum(-(-int(one) // split) for one in lengths) * 8
    assert _PROGRAMS / 2 <= num_programs <= _PROGRAMS


@pytest.mark.parametrize(("heads", "kv"), [(1, 1), (8, 1), (20, 1), (3, 3)])
@pytest.mark.parametrize("dim", [8, 80, 96, 256])
def test_decode_with_heads_of_any_kind(where, heads, kv, dim):
    check_decode(where, [70, 3], heads=heads, kv=kv, dim=dim, splits=2)


@pytest.mark.parametrize(("window", "sinks"), [(0, True), (5, False), (70, True)])
@pytest.mark.parametrize("splits", [1, 4])
def test_few_queries_of_a_sequence_see_what_is_before_them(where, window, sinks, splits):
    counts = [1, 30, 16, 2, 5]
    lengths = [90, 30, 140, 65, 64]
    check_decode(where, lengths, counts=counts, window=window, sinks=sinks, splits=splits, dim=16)


@pytest.mark.parametrize(("counts", "page_size"), [([64], 64), ([40, 3], 16)])
def test_many_rows_are_one_tile_in_half_precision(where, counts, page_size):
    """128 of them: 4 heads of 32 queries."""
    if where.dtype is torch.float32:
        pytest.skip("tiles of so many rows are for half precision")
    lengths = [200, 70][: len(counts)]
    options = {"heads": 4, "kv": 1, "dim": 32, "page_size": page_size, "splits": 2}
    check_decode(where, lengths, counts=counts, **options)


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 3, 16), (7, 6, 40)])
def test_merge(where, rows, heads, dim):
    check_merge(where, rows, heads, dim)
