"""The kernels against their definitions in float64: on CUDA, and on a CPU in Triton's interpreter.

Pages lie scattered in a pool whose every other byte is no number: nothing of it may come through.
"""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

IS_INTERPRETED = (
    importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
)
interpreted = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's: e^1000 is infinite
]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-5


def _mend_interpreter() -> None:
    """Its scalars are arrays of one element, which numpy ≥ 2.4 does not take for an integer."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if IS_INTERPRETED:
    _mend_interpreter()


@dataclass(frozen=True)
class Where:
    device: str
    dtype: torch.dtype

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.device, self.dtype)

    def ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        limit = TOLERANCES[self.dtype]
        assert found.dtype == self.dtype
        torch.testing.assert_close(found.double(), expected.double(), rtol=limit, atol=limit)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def check_norms(where: Where, rows: int, size: int) -> None:
    from quire.engine.kernels.norm import add_norm, norm

    torch.manual_seed(rows + size)
    x, hidden = where.randn(rows, size), where.randn(rows, size)
    weight, post = where.randn(size), torch.randn(size, device=where.device) + 1
    where.close(norm(x, weight, EPS), rms(x, weight))
    for after in (None, post):
        added = x.double() if after is None else rms(x, after).to(where.dtype).double()
        expected = (added + hidden.double()).to(where.dtype)
        stream = hidden.clone()
        normed = add_norm(x, stream, weight, EPS, after)
        where.close(stream, expected)
        where.close(normed, rms(expected, weight))


def check_activation(where: Where, activation: str, rows: int, size: int) -> None:
    from torch.nn import functional

    from quire.engine.kernels.activation import activate

    torch.manual_seed(rows)
    both = where.randn(rows, 2 * size) * 3
    gate, up = both.double().chunk(2, -1)
    if activation == "silu":
        act = functional.silu(gate)
    else:
        act = functional.gelu(gate, approximate="none" if activation == "gelu" else "tanh")
    where.close(activate(both, activation), act * up)


def poisoned(where: Where, num_pages: int, page_size: int, kv: int, dim: int) -> torch.Tensor:
    shape = (num_pages, page_size, kv, dim)
    return torch.full(shape, float("nan"), dtype=where.dtype, device=where.device)


def check_append(where: Where, kv: int, dim: int) -> None:
    from quire.engine.kernels.append import append

    torch.manual_seed(dim)
    keys, values = (poisoned(where, 5, 4, kv, dim) for _ in range(2))
    key = where.randn(3, kv, dim).transpose(0, 1)
    value = where.randn(3, 2 * kv, dim)[:, kv:].transpose(0, 1)
    slots = [13, -1, 6]
    append(key, value, where.ints(slots), keys, values)
    for plane, new in ((keys, key), (values, value)):
        flat = plane.flatten(0, 1)
        for row in (0, 2):
            assert torch.equal(flat[slots[row]], new[:, row])
        rest = [slot for slot in range(20) if slot not in slots]
        assert torch.isnan(flat[rest]).all()


def check_turn(
    where: Where, rows: int, heads: int, kv: int, dim: int, *, normed: bool, appends: bool
) -> None:
    from quire.engine.kernels.positions import turn

    torch.manual_seed(dim + rows)
    qkv = where.randn(rows, (heads + 2 * kv) * dim)
    angles = torch.rand(rows, dim // 2, device=where.device) * 20
    cos, sin = angles.cos() * 1.1, angles.sin() * 1.1
    norms = where.randn(heads + kv, dim) if normed else None
    before = qkv.view(rows, -1, dim).clone()
    expected = before.double()
    if norms is not None:
        expected[:, : heads + kv] = rms(expected[:, : heads + kv], norms)
    one, two = expected[:, : heads + kv].chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    expected[:, : heads + kv] = torch.cat((one * c - two * s, two * c + one * s), -1)
    keys, values = (poisoned(where, -(-rows // 4) + 1, 4, kv, dim) for _ in range(2))
    places = torch.randperm(4 * (-(-rows // 4) + 1))[:rows].tolist()
    places[rows // 2] = -1
    pages = {"slots": where.ints(places), "keys": keys, "values": values} if appends else {}
    turn(qkv, cos, sin, num_kv_heads=kv, norms=norms, eps=EPS, **pages)
    after = qkv.view(rows, -1, dim)
    where.close(after[:, : heads + kv], expected[:, : heads + kv])
    assert torch.equal(after[:, heads + kv :], before[:, heads + kv :])
    written = [slot for slot in places if slot >= 0] if appends else []
    some = [row for row in range(rows) if places[row] >= 0] if appends else []
    for plane, first in ((keys, heads), (values, heads + kv)):
        assert torch.equal(plane.flatten(0, 1)[written], after[some, first : first + kv])
        others = [slot for slot in range(len(plane) * 4) if slot not in written]
        assert torch.isnan(plane.flatten(0, 1)[others]).all()


def check_decode(
    where: Where,
    lengths: list[int],
    *,
    counts: list[int] | None = None,
    heads: int = 6,
    kv: int = 2,
    dim: int = 64,
    page_size: int = 16,
    window: int = 0,
    sinks: bool = False,
    splits: int = 0,
) -> None:
    """`counts`: queries of each sequence, its last tokens; else one. `splits`: so many at most, as
    short as can be; else as they are chosen."""
    from quire.engine.kernels import decode as kernel

    torch.manual_seed(sum(lengths))
    counts = counts or [1] * len(lengths)
    needed = [-(-length // page_size) for length in lengths]
    keys, values = (poisoned(where, 2 * sum(needed) + 2, page_size, kv, dim) for _ in range(2))
    free = iter(torch.randperm(len(keys)).tolist())
    tables = [[next(free) for _ in range(count)] for count in needed]
    sequences = [(where.randn(n, kv, dim), where.randn(n, kv, dim)) for n in lengths]
    for table, length, pair in zip(tables, lengths, sequences, strict=True):
        for plane, tokens in zip((keys, values), pair, strict=True):
            for i, page in enumerate(table):
                part = tokens[i * page_size : min(length, (i + 1) * page_size)]
                plane[page, : len(part)] = part
    order = torch.randperm(len(lengths)).tolist()
    rows = [1 + sum(counts[i] for i in order[: order.index(mine)]) for mine in range(len(lengths))]
    num_rows = 2 + sum(counts)
    query = where.randn(num_rows, heads + 1, dim)[:, :heads].transpose(0, 1)
    out = torch.full((num_rows, heads, dim), 7.0, dtype=where.dtype, device=where.device)
    sink = torch.randn(heads, device=where.device) * 2 if sinks else None
    firsts = [3 + sum(needed[:i]) for i in range(len(lengths))]
    pages = [-1, -1, -1, *(page for table in tables for page in table), -1]
    columns = [where.ints(column) for column in (rows, counts, lengths, firsts, pages)]
    most = splits or kernel.num_splits(len(lengths), kv)
    split = 64
    if not splits:
        numbers = np.array(lengths, dtype=np.int32)
        split = kernel.split_tokens(numbers, window, max_splits=most, num_kv_heads=kv)
    kernel.decode(
        query,
        keys,
        values,
        kernel.Tables(*columns, where.ints([split]), most, max(counts)),
        out,
        scaling=0.3,
        window=window,
        sinks=sink,
    )
    for row, count, (k, v) in zip(rows, counts, sequences, strict=True):
        for j in range(count):
            end = len(k) - count + j + 1
            where.close(out[row + j], defined(query[:, row + j], k[:end], v[:end], window, sink))
    assert (out[[0, -1]] == 7).all()


def defined(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, sink: torch.Tensor | None
) -> torch.Tensor:
    """query [heads, dim], k and v [tokens, kv heads, dim]: the last token's attention."""
    if not len(k):
        return torch.zeros_like(query)
    if window:
        k, v = k[-window:], v[-window:]
    group = query.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,nhd->hn", query.double(), k) * 0.3
    if sink is not None:
        scores = torch.cat((scores, sink.double()[:, None]), -1)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(k)], v)


def check_merge(where: Where, rows: int, heads: int, dim: int) -> None:
    from quire.engine.kernels.merge import merge

    torch.manual_seed(rows)
    query, k, v = (where.randn(heads, n, dim).double() for n in (rows, 9, 9))
    scores = query @ k.transpose(1, 2)
    scores[:, 0, :4] = -40  # all of one side's weight is nearly nothing

    def part(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = scores[..., a:b].softmax(-1) @ v[:, a:b]
        packed = out.transpose(0, 1).to(where.dtype).contiguous().transpose(0, 1)
        return packed, scores[..., a:b].logsumexp(-1).float()

    (one, one_l), (two, two_l) = part(0, 4), part(4, 9)
    merge(one, one_l, two, two_l)
    where.close(one, scores.softmax(-1) @ v)
    torch.testing.assert_close(one_l.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
