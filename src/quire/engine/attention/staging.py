"""Small arrays between host and device, without waiting for either, nor for the copy engines.

The copy engines are full of the cache's pages: a small copy that queues there waits for megabytes
of them, and the step with it. So everything goes through pinned memory that a kernel reads, or
writes, over the link itself. That memory is used again once the kernel has run.

    lent ──filled, kernel launched──▶ in use ──event passed──▶ free        to the device
    lent ──kernel launched──▶ in use ──waited for, read──▶ free            from it

Knows one device; used by one thread.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.memory.visible import device_view

_ALIGNMENT_WORDS = 4
_LEAST_WORDS = 1 << 10
_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}

Array = npt.NDArray[Any]
_Words = npt.NDArray[np.int32]


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in_use: dict[int, deque[_Lent]] = defaultdict(deque)
        """By size, in the order of their kernels."""
        self._arriving: set[_Lent] = set()
        """Held here too: a kernel may write into what nobody waits for any more."""

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Each as a tensor there. On a CPU they may share the arrays' memory."""
        if self._device.type == "cpu":
            return [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in arrays]
        firsts: list[int] = []
        end = 0
        for array in arrays:
            firsts.append(end)
            end += -(-array.nbytes // (4 * _ALIGNMENT_WORDS)) * _ALIGNMENT_WORDS
        there = torch.empty(end, dtype=torch.int32, device=self._device)
        with self.filling(there) as (words,):
            block = words.view(np.uint8)
            for first, array in zip(firsts, arrays, strict=True):
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                block[4 * first : 4 * first + array.nbytes] = flat
        flat_there = there.view(torch.uint8)
        return [
            flat_there[4 * first : 4 * first + array.nbytes]
            .view(_DTYPES[array.dtype])
            .view(array.shape)
            for first, array in zip(firsts, arrays, strict=True)
        ]

    @contextmanager
    def filling(self, *targets: torch.Tensor) -> Iterator[list[_Words]]:
        """What is written into these words goes to `targets`, int32 on the device and of the same
        shapes, when it ends. They hold anything to begin with."""
        ends = list(itertools.accumulate(target.numel() for target in targets))
        lent = self._lend(ends[-1])
        places = [
            (slice(end - target.numel(), end), target.shape)
            for end, target in zip(ends, targets, strict=True)
        ]
        yield [lent.here[words].view(shape).numpy() for words, shape in places]
        for (words, shape), target in zip(places, targets, strict=True):
            _by_kernel(lent.there[words].view(shape), target)
        lent.used()
        self._in_use[lent.num_words].append(lent)

    def receive(self, tensor: torch.Tensor) -> Arriving:
        """What it holds by now, on its way to the host."""
        words = tensor.contiguous().view(-1).view(torch.int32)
        lent = self._lend(words.numel())
        _by_kernel(words, lent.there[: words.numel()])
        lent.used()
        self._arriving.add(lent)
        return Arriving(self, lent, tensor)

    def give_back(self, lent: _Lent) -> None:
        self._arriving.remove(lent)
        self._in_use[lent.num_words].append(lent)

    def _lend(self, num_words: int) -> _Lent:
        size = max(_LEAST_WORDS, 1 << (num_words - 1).bit_length())
        waiting = self._in_use[size]
        if waiting and waiting[0].is_free:
            return waiting.popleft()
        return _Lent(size, self._device)


class Arriving:
    """What a tensor held. To be waited for once, or its memory is not used again."""

    def __init__(self, staging: Staging, lent: _Lent, like: torch.Tensor) -> None:
        self._staging = staging
        self._lent = lent
        self._shape, self._dtype = like.shape, like.dtype

    def wait(self) -> torch.Tensor:
        """For that, not for what the device was given since."""
        lent = self._lent
        lent.wait()
        num_words = self._shape.numel() * self._dtype.itemsize // 4
        found = lent.here[:num_words].clone().view(self._dtype).view(self._shape)
        self._staging.give_back(lent)
        return found


class _Lent:
    """Some pinned memory, as the host sees it and as the device does."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.num_words = num_words
        on_cuda = device.type == "cuda"
        self.here = torch.empty(num_words, dtype=torch.int32, pin_memory=on_cuda)
        there = device_view(self.here, device)
        assert there is not None, "torch's pinned memory is addressed alike by all"
        self.there = there
        self._event: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def used(self) -> None:
        """A kernel that uses it has been launched."""
        if self._event is not None:
            self._event.record()

    @property
    def is_free(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def _by_kernel(source: torch.Tensor, target: torch.Tensor) -> None:
    """target = source. What torch calls a copy would be one for the copy engines."""
    torch.bitwise_or(source, 0, out=target)
