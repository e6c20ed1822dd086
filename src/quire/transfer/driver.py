"""The driver's copies that torch has no name for: rectangles, and many pieces in one call.

Knows the driver's library and its structures; nothing of pools. Everything here only launches.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError, WorkerError

MAX_PITCH_BYTES = (1 << 31) - 1
"""From one row of a rectangle to the next."""
HOST, DEVICE = 1, 2
"""Kinds of memory."""

_SIDE = [("x", "u8"), ("y", "u8"), ("kind", "u4"), ("_", "u4")]
_SIDE += [("host", "u8"), ("device", "u8"), ("array", "u8"), ("pitch", "u8")]
RECTANGLE = np.dtype([("source", _SIDE), ("target", _SIDE), ("width", "u8"), ("height", "u8")])
"""CUDA_MEMCPY2D: `height` rows of `width` bytes, a pitch apart on each side."""

_ATTRIBUTES = np.dtype([("order", "u4"), ("source", "u4", 2), ("target", "u4", 2), ("flags", "u4")])
"""CUmemcpyAttributes."""
_IN_ORDER = np.array([(1, (0, 0), (0, 0), 0)], _ATTRIBUTES)
"""Of the stream."""
_FROM_THE_FIRST = np.zeros(1, np.uint64)
"""The piece from which on those attributes hold."""

Rectangles = np.ndarray[Any, Any]
Addresses = npt.NDArray[np.uint64]


def copy_rectangles(rectangles: Rectangles, stream: int) -> None:
    """One after the other. Raises WorkerError."""
    copy = rectangle_copy()
    first, size = rectangles.ctypes.data, RECTANGLE.itemsize
    for address in range(first, first + len(rectangles) * size, size):
        _check(copy(address, stream))


def copy_pieces(sources: Addresses, targets: Addresses, size_bytes: int, stream: int) -> None:
    """All of them, each `size_bytes`, in no order among themselves. Raises WorkerError."""
    sizes = np.full(len(sources), size_bytes, np.uint64)
    copy, has_failed_index = piece_copy()
    failed = ctypes.c_size_t()
    _check(
        copy(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(sources),
            _IN_ORDER.ctypes.data,
            _FROM_THE_FIRST.ctypes.data,
            1,
            *((ctypes.byref(failed),) if has_failed_index else ()),
            stream,
        )
    )


@cache
def rectangle_copy() -> Any:
    """Raises ConfigError."""
    copy = _function("cuMemcpy2DAsync_v2")
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return copy


@cache
def piece_copy() -> tuple[Any, bool]:
    """The call, and whether it is that of CUDA 12, which says which piece failed. Raises
    ConfigError."""
    pointers, count = [ctypes.c_void_p] * 3, [ctypes.c_size_t]
    common = pointers + count + [ctypes.c_void_p] * 2 + count
    try:
        copy, has_failed_index = _function("cuMemcpyBatchAsync_v2"), False
    except ConfigError:
        copy, has_failed_index = _function("cuMemcpyBatchAsync"), True
    copy.argtypes = common + [ctypes.c_void_p] * (2 if has_failed_index else 1)
    return copy, has_failed_index


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"the driver's library cannot be used ({error})") from error


def _function(name: str) -> Any:
    try:
        return getattr(_library(), name)
    except AttributeError as error:
        raise ConfigError(f"the driver has no {name}: it is too old") from error


def _check(code: int) -> None:
    if code:
        raise WorkerError(f"the device's copy engines refused a copy (CUDA error {code})")
