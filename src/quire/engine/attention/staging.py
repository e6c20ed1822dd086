"""Small arrays from the host to the device, without waiting for either.

A copy from ordinary memory makes the host wait until the device has come to it. So everything goes
through pinned memory, all of a call in one copy. torch's own allocator lends that memory, and does
not lend it again before the copy out of it has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
}

Array = npt.NDArray[Any]


def send(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Each as a tensor there. On a CPU they may share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
    firsts: list[int] = []
    end = 0
    for array in arrays:
        firsts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    block = staging.numpy()
    for first, array in zip(firsts, arrays, strict=True):
        block[first : first + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = staging.to(device, non_blocking=True)
    return [
        there[first : first + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for first, array in zip(firsts, arrays, strict=True)
    ]
