"""CudaCopyEngine: the torch reference on CUDA, one stream and one launching thread per direction.

Scheme: the pinned host pool is seen by the device as a tensor of its own (unified addressing), so
gathering pages *is* the transfer. Per layer and plane, one index kernel reads the source rows into
a bounded staging buffer on the device and a second one writes them to their destination; an event
follows each layer. Compared with the alternatives:

    memcpy per (page, layer, plane)   thousands of small copies: bound by launches
    memcpy per page, then scatter     layer 0 is complete only when the last page has arrived
    gather on the CPU, then memcpy    costs host memory bandwidth three times

What it costs is compute units while a copy runs; kernels that use a handful of them come with the
Triton engine. Launching happens on a thread because a full launch queue blocks the launcher, and
the step must not block.

Order between streams: at submission an event is recorded on the caller's current stream, and the
copy stream waits for it. So a backup sees what was computed before it, and a load does not
overwrite pages that earlier work still reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.errors import ConfigError
from quire.memory.device import DevicePool
from quire.memory.host import HostPool, plane_words
from quire.transfer.base import Copy, CopyState
from quire.transfer.reference import Direction, Side, TorchCopyEngine, copy_rows
from quire.types import PageIds, page_array

_STAGING_BYTES = 32 << 20
_TYPE_STRINGS = {8: "<i8", 4: "<i4", 2: "<i2", 1: "|u1"}


class CudaCopy(Copy):
    """A copy on a stream. Each layer's event exists from the start but counts once recorded: a
    layer is *moved* when it has been launched."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        super().__init__(num_layers)
        self._device = device
        self.start = _new_event()
        self._arrived = [_new_event() for _ in range(num_layers)]
        self.fence = torch.cuda.current_stream(device).record_event()
        """On the caller's stream: what was launched there before."""

    @property
    def state(self) -> CopyState:
        launched = super().state
        if launched is not CopyState.DONE:
            return launched
        try:
            if not _passed(self._arrived[-1]):
                return CopyState.RUNNING
        except RuntimeError as error:  # the device itself failed: sticky, and reported here
            self.fail(error)
            return CopyState.FAILED
        self.seconds = float(self.start.elapsed_time(self._arrived[-1])) / 1e3
        return CopyState.DONE

    def layer_done(self, layer: int) -> bool:
        return super().layer_done(layer) and _passed(self._arrived[layer])

    def wait_layer(self, layer: int) -> None:
        # The thread waits only until the layer's copy has been *launched*.
        super().wait_layer(layer)
        torch.cuda.current_stream(self._device).wait_event(self._arrived[layer])

    def wait(self) -> None:
        super().wait()
        self._arrived[-1].synchronize()

    def layer_launched(self, stream: torch.cuda.Stream) -> None:
        self._arrived[self._num_moved].record(stream)
        self.layer_moved()


class _StreamDirection(Direction):
    """Its thread launches on a stream of its own."""

    def __init__(self, name: str, device: DevicePool) -> None:
        super().__init__(name, device, _STAGING_BYTES)
        self._where = device.device
        self._stream = torch.cuda.Stream(self._where)  # type: ignore[no-untyped-call]
        # The buffer was made on another stream: its memory must be ours before the first copy.
        self._stream.wait_stream(torch.cuda.current_stream(self._where))

    def start(self, source: Side, target: Side) -> Copy:
        copy = CudaCopy(len(source.planes), self._where)
        self._submit(copy, lambda: self._launch(copy, source, target))
        return copy

    def close(self) -> None:
        super().close()
        self._stream.synchronize()

    def _launch(self, copy: CudaCopy, source: Side, target: Side) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(copy.fence)
            from_index, to_index = self._indices(source.pages, target.pages)
            copy.start.record(self._stream)
            for planes_from, planes_to in zip(source.planes, target.planes, strict=True):
                for plane_from, plane_to in zip(planes_from, planes_to, strict=True):
                    copy_rows(plane_from, from_index, plane_to, to_index, self._staging)
                copy.layer_launched(self._stream)

    def _indices(self, source: PageIds, target: PageIds) -> tuple[torch.Tensor, torch.Tensor]:
        # Pinned, so that sending them does not wait for the stream to drain; torch keeps the
        # buffer until the transfer has happened.
        pages = np.stack([page_array(source), page_array(target)]).astype(np.int64)
        both = torch.from_numpy(pages).pin_memory().to(self._where, non_blocking=True)
        return both[0], both[1]


class CudaCopyEngine(TorchCopyEngine):
    def __init__(self, device: DevicePool, host: HostPool) -> None:
        if host.num_pages and not host.pinned:
            raise ConfigError("host pool is not pinned: build it with pin_for=the CUDA device")
        layers = range(device.layout.num_layers)
        pages = _on_device(host, device.device)
        super().__init__(
            [device.words(layer) for layer in layers],
            [plane_words(device.layout, pages, layer) for layer in layers],
            _StreamDirection("load", device),
            _StreamDirection("backup", device),
        )


class _PinnedMemory:
    """Describes pinned host memory to torch as if it were device memory, and keeps it alive."""

    def __init__(self, host: HostPool) -> None:
        layout = host.layout
        self.pool = host
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.num_pages, layout.page_stride_bytes // layout.word_bytes),
            "typestr": _TYPE_STRINGS[layout.word_bytes],
            "data": (host.data_ptr, False),
            "strides": None,
            "version": 3,
        }


def _on_device(host: HostPool, device: torch.device) -> torch.Tensor:
    """The host pool, [num_pages, stride words], addressed from the device."""
    pages = torch.as_tensor(_PinnedMemory(host), device=device)
    if pages.data_ptr() != host.data_ptr:  # torch copied: pinned for another device than this one
        raise ConfigError(f"host pool is pinned for another device than {device}")
    return pages


# torch leaves these untyped.


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
