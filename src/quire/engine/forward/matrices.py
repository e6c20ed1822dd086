"""Products with a model's matrices, as fast as the device that computes them can.

On a CPU, in float32, a matrix is kept in the layout of oneDNN. A product with one row to eight then
takes the same time, since all of it is reading the matrix: BLAS takes twice as long for two rows
as for one, and steps that check proposals would not pay. Longer ones take a tenth less. And what
comes out for a row does not hang on how many others are computed with it. One row or two are
slower than four, so they are made up to four.

Knows tensors only.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_BEST_ROWS = 4
"""oneDNN chooses its layout for so many."""
_FEW_ROWS = 8


def are_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `packed` makes another matrix of one there."""
    return device.type == "cpu" and dtype == torch.float32 and torch._C._has_mkldnn


def packed(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] as `product` likes it best on its device; no longer good for anything else."""
    if not are_packed(weight.device, weight.dtype):
        return weight
    made: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _BEST_ROWS)
    return made


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[row, in] → [row, out]"""
    if weight.is_mkldnn:
        rows = len(x)
        if rows < _BEST_ROWS - 1:
            x = functional.pad(x, (0, 0, 0, _BEST_ROWS - rows))
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return made[:rows]
    return functional.linear(x, weight, bias)


def logits_of(x: torch.Tensor, head: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`product` with an output head, which is not packed: it may be the embedding too. A few rows
    on a CPU are taken for columns, for BLAS does better so."""
    rows = len(x)
    if out is None and x.device.type == "cpu" and 0 < rows <= _FEW_ROWS:
        if rows == 1:
            x = functional.pad(x, (0, 0, 0, 1))
        return torch.mm(head, x.t()).t()[:rows].contiguous()
    return torch.mm(x, head.t(), out=out)
