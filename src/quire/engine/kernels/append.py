"""New keys and values into their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _append(
    key, value, slots, keys, values,
    key_head, key_row, value_head, value_row,
    KV: tl.constexpr, D: tl.constexpr, BKV: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        h = tl.arange(0, BKV)[:, None]
        d = tl.arange(0, BD)[None, :]
        inside = (h < KV) & (d < D)
        to = slot * (KV * D) + h * D + d
        k = tl.load(key + h * key_head + row * key_row + d, mask=inside, other=0.0)
        v = tl.load(value + h * value_head + row * value_row + d, mask=inside, other=0.0)
        tl.store(keys + to, k, mask=inside)
        tl.store(values + to, v, mask=inside)


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """`key` and `value` [kv heads, row, dim], heads contiguous in dim; `slots` [row], −1: nowhere;
    `keys` and `values`: a layer's pages, [pages, page_size, kv heads, dim], contiguous."""
    heads, rows, dim = key.shape
    if key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.contiguous(), value.contiguous()
    if rows:
        _append[(rows,)](
            key,
            value,
            slots,
            keys,
            values,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            KV=heads,
            D=dim,
            BKV=triton.next_power_of_2(heads),
            BD=triton.next_power_of_2(dim),
        )
