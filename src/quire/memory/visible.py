"""Pinned host memory as the device addresses it: kernels read and write it where it is.

Knows torch's tensors; not what lies in them.
"""

from __future__ import annotations

from typing import Any

import torch

_TYPE_STRINGS = {torch.int64: "<i8", torch.int32: "<i4", torch.int16: "<i2", torch.uint8: "|u1"}


def device_view(memory: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """The same bytes, as a tensor of the device; `memory` is contiguous, and lives as long. On a
    CPU it is the memory itself. None: it is not pinned for this device."""
    if device.type == "cpu":
        return memory
    view = torch.as_tensor(_Described(memory), device=device)
    return view if view.data_ptr() == memory.data_ptr() else None  # else torch has copied


class _Described:
    """Describes host memory to torch as if it were device memory, and keeps it alive."""

    def __init__(self, memory: torch.Tensor) -> None:
        assert memory.is_contiguous()
        self.memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(memory.shape),
            "typestr": _TYPE_STRINGS[memory.dtype],
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
