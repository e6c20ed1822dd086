"""CudaCopyEngine: movers on streams, one stream and one launching thread per direction.

A load is launched in groups of layers, each followed by an event, so that attention can begin with
the first layers while the last are on their way. A backup, whose layers nobody waits for, is one
launch. Launching happens on a thread because a full launch queue blocks the launcher, and the step
must not block.

Order between streams: at submission an event is recorded on the caller's current stream, and the
copy stream waits for it. So a backup sees what was computed before it, and a load does not
overwrite pages that earlier work still reads.
"""

from __future__ import annotations

import torch

from quire.errors import ConfigError
from quire.memory.device import DevicePool, word_dtype
from quire.memory.host import HostPool
from quire.memory.visible import device_view
from quire.transfer.base import Copy, CopyState
from quire.transfer.choice import Chosen
from quire.transfer.directed import DirectedEngine, Direction
from quire.transfer.movers import Ends, Mover, groups
from quire.types import PageIds, page_array

_LOAD_BYTES = 256 << 20
"""Five milliseconds on the link, beside which it is little to start one."""
_BACKUP_BYTES = 32 << 20
"""Of a backup at least, if it can wait: half a millisecond on the link, and some tens of
microseconds of the step's interpreter to start, however small it is."""


class CudaCopy(Copy):
    """A copy on a stream. A layer is *moved* when it has been launched; it has arrived when the
    event after its group has passed."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        super().__init__(num_layers)
        self._device = device
        self._arrived: list[torch.cuda.Event] = []
        """Of each layer that has been launched."""
        self._began = _new_event(timed=True)
        self._ended = _new_event(timed=True)
        self._fence = torch.cuda.current_stream(device).record_event()
        """On the caller's stream: what was launched there before."""

    @property
    def state(self) -> CopyState:
        launched = super().state
        if launched is not CopyState.DONE:
            return launched
        try:
            if not _passed(self._ended):
                return CopyState.RUNNING
        except RuntimeError as error:  # the device itself failed: sticky, and reported here
            self.fail(error)
            return CopyState.FAILED
        self.seconds = float(self._began.elapsed_time(self._ended)) / 1e3
        return CopyState.DONE

    def layer_done(self, layer: int) -> bool:
        return super().layer_done(layer) and _passed(self._arrived[layer])

    def wait_layer(self, layer: int) -> None:
        # The thread waits only until the layer's copy has been *launched*.
        super().wait_layer(layer)
        torch.cuda.current_stream(self._device).wait_event(self._arrived[layer])

    def wait(self) -> None:
        super().wait()
        self._ended.synchronize()

    def begin(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._fence)
        self._began.record(stream)

    def layers_launched(self, layers: range, stream: torch.cuda.Stream) -> None:
        is_last = layers.stop == self._num_layers
        event = self._ended if is_last else _new_event(timed=False)
        event.record(stream)
        self._arrived += [event] * len(layers)
        self.layers_moved(len(layers))


class StreamDirection(Direction):
    """Its thread launches on a stream of its own."""

    def __init__(self, name: str, device: DevicePool, mover: Mover, *, in_groups: bool) -> None:
        """`in_groups`: somebody waits for single layers."""
        super().__init__(name)
        self._where = device.device
        self._num_layers = device.layout.num_layers
        self._parts = device.parts
        self._mover = mover
        self._in_groups = in_groups
        self._stream = torch.cuda.Stream(self._where)  # type: ignore[no-untyped-call]
        # What the mover has made was made on another stream: it must be there before it is used.
        self._stream.wait_stream(torch.cuda.current_stream(self._where))

    def start(self, device_pages: PageIds, host_pages: PageIds) -> Copy:
        copy = CudaCopy(self._num_layers, self._where)
        self._submit(copy, lambda: self._launch(copy, device_pages, host_pages))
        return copy

    def close(self) -> None:
        super().close()
        self._stream.synchronize()

    def _launch(self, copy: CudaCopy, device_pages: PageIds, host_pages: PageIds) -> None:
        with torch.cuda.stream(self._stream):
            copy.begin(self._stream)
            device, host = page_array(device_pages), page_array(host_pages)
            try:
                for part, of_part in enumerate(self._parts):
                    move = self._mover.plan(device[part :: len(self._parts)], host)
                    for layers in groups(of_part, move.group if self._in_groups else None):
                        move.launch(layers)
                        copy.layers_launched(layers, self._stream)
            except Exception:
                self._stream.synchronize()  # once it has failed, nothing of it moves any more
                raise


class CudaCopyEngine(DirectedEngine):
    def __init__(self, device: DevicePool, chosen: Chosen) -> None:
        super().__init__(
            StreamDirection("load", device, chosen.loads, in_groups=True),
            StreamDirection("backup", device, chosen.backups, in_groups=False),
            chosen.reason,
            load_pages=-(-_LOAD_BYTES // device.layout.page_bytes),
            backup_pages=-(-_BACKUP_BYTES // device.layout.page_bytes),
        )


def ends_of(device: DevicePool, host: HostPool) -> Ends:
    """Raises ConfigError unless the host pool is pinned, for this device."""
    if host.num_pages and not host.pinned:
        raise ConfigError("host pool is not pinned: build it with pin_for=the CUDA device")
    if not host.num_pages:
        return Ends(device, host.raw().view(word_dtype(host.layout)), host.raw())
    pages = device_view(host.raw().view(word_dtype(host.layout)), device.device)
    if pages is None:
        raise ConfigError(f"host pool is pinned for another device than {device.device}")
    return Ends(device, pages, host.raw(), host.slice_pages)


# torch leaves these untyped.


def _new_event(*, timed: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
