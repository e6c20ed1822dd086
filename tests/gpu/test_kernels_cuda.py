"""The kernels on CUDA, in every type, at the sizes of real models."""

import pytest
import torch

from attention_cases import Sequences
from kernel_cases import (
    TOLERANCES,
    Where,
    check_activation,
    check_append,
    check_decode,
    check_merge,
    check_norms,
    check_turn,
)
from quire.engine.attention import Heads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def where(request):
    return Where("cuda", request.param)


@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (3, 48), (2, 1152), (300, 5376)])
def test_norms(where, rows, size):
    check_norms(where, rows, size)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 12288), (300, 1100)])
def test_activations(where, activation, rows, size):
    check_activation(where, activation, rows, size)


@pytest.mark.parametrize(("kv", "dim"), [(1, 16), (3, 40), (8, 128), (4, 256)])
def test_append(where, kv, dim):
    check_append(where, kv, dim)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(1, 32, 8, 128), (5, 6, 3, 40), (64, 8, 4, 256), (300, 32, 8, 128), (300, 9, 3, 96)],
)
def test_turn(where, shape, normed, appends):
    check_turn(where, *shape, normed=normed, appends=appends)


@pytest.mark.parametrize(
    ("page_size", "splits"),
    [*((size, 0) for size in (1, 4, 16, 32, 48, 64, 128, 256)), (16, 1), (64, 1), (64, 4)],
)
def test_decode_over_pages_of_any_size(where, page_size, splits):
    lengths = [1, 0, 64, 65, 200, 1000]
    check_decode(where, lengths, page_size=page_size, splits=splits, heads=32, kv=8, dim=128)


@pytest.mark.parametrize(("window", "sinks"), [(0, True), (1, False), (50, True), (64, False)])
@pytest.mark.parametrize("splits", [1, 8])
def test_decode_with_windows_and_sinks(where, window, sinks, splits):
    check_decode(where, [1, 63, 0, 64, 130, 700], window=window, sinks=sinks, splits=splits)


@pytest.mark.parametrize(
    ("heads", "kv", "dim"),
    [
        *((heads, kv, 128) for heads, kv in ((1, 1), (8, 1), (20, 1), (3, 3), (32, 8), (28, 4))),
        *((6, 3, dim) for dim in (8, 16, 64, 80, 96, 256)),
    ],
)
def test_decode_with_heads_of_any_kind(where, heads, kv, dim):
    check_decode(where, [70, 3, 500], heads=heads, kv=kv, dim=dim)


def test_decode_of_many_sequences(where):
    lengths = torch.randint(1, 400, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    check_decode(where, lengths, heads=32, kv=8, dim=128)


@pytest.mark.parametrize(("window", "sinks"), [(0, True), (5, False), (70, True)])
@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        *(((32, 8, 128), splits) for splits in (0, 1, 4)),
        ((8, 4, 256), 0),
        ((7, 1, 64), 0),
        ((3, 3, 16), 4),
    ],
)
def test_few_queries_see_what_is_before_them(where, window, sinks, splits, shape):
    counts, lengths = [1, 30, 16, 2, 5, 128], [90, 30, 140, 65, 64, 700]
    options = {"window": window, "sinks": sinks, "splits": splits}
    options |= dict(zip(("heads", "kv", "dim"), shape, strict=True))
    check_decode(where, lengths, counts=counts, **options)


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 3, 16), (7, 6, 40), (300, 32, 128)])
def test_merge(where, rows, heads, dim):
    check_merge(where, rows, heads, dim)


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("sinks", [True, False])
def test_attention_of_mixed_batches(where, window, sinks):
    from quire.engine.attention.triton import TritonAttention

    shapes = [(40, 1), (0, 20), (33, 9), (7, 1), (0, 1), (64, 70)]
    dtype = str(where.dtype).removeprefix("torch.")
    case = Sequences(
        shapes,
        5,
        window,
        sinks,
        backend=TritonAttention,
        device="cuda",
        dtype=dtype,
        there=frozenset() if window else frozenset({0, 3}),
    )
    case.check(2 * TOLERANCES[where.dtype])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_way_to_compute_a_part_gives_the_same(dtype, is_causal):
    """What a way refuses is no failure here, and is printed."""
    from quire.engine.attention import prefixed

    torch.manual_seed(1)
    row = torch.randn(2048, 48, 128, device="cuda", dtype=dtype).transpose(0, 1)
    heads = Heads(row[:32], row[32:40], row[40:])
    expected = prefixed.by_definition(Heads(*(x.float() for x in heads)), is_causal, 0.1)
    for way in (prefixed._flash, prefixed._cudnn, prefixed._cudnn_repeated):
        try:
            part = way(heads, is_causal, 0.1)
        except RuntimeError as error:
            print(f"{way.__name__} refuses: {error}")
            continue
        limit = TOLERANCES[dtype]
        torch.testing.assert_close(part.out.float(), expected.out, rtol=limit, atol=limit)
        torch.testing.assert_close(part.lse, expected.lse, rtol=1e-3, atol=1e-3)
