"""What a copy engine promises, and how a copy comes to its end. Knows no torch.

A copy moves whole pages between one component's host and device pools and arrives layer by layer,
layer 0 first. Engines are asynchronous: load() and backup() return at once, on the step's thread,
and never wait for bytes. Several copies may be under way at once; the caller (the leader) makes
sure that no two of them write the same page and that nothing reads a page that is being written.

    RUNNING ──last layer arrived──▶ DONE
       └──────anything raised─────▶ FAILED      the destination pages hold rubbish
"""

from __future__ import annotations

import enum
import threading
from typing import Protocol

from quire.errors import WorkerError
from quire.types import PageIds


class CopyState(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Copy:
    """One load or backup under way, which a thread of its engine moves layer by layer."""

    def __init__(self, num_layers: int) -> None:
        self.error = ""
        """Why it failed."""
        self.seconds = 0.0
        """Time the bytes took to move, once `state` has said DONE."""
        self._num_layers = num_layers
        self._num_moved = 0
        self._changed = threading.Condition()

    @property
    def state(self) -> CopyState:
        """Asks the device, without waiting."""
        if self.error:
            return CopyState.FAILED
        return CopyState.DONE if self._num_moved == self._num_layers else CopyState.RUNNING

    def layer_done(self, layer: int) -> bool:
        """Have all pages of this layer (and so of every earlier one) arrived?"""
        return self._num_moved > layer

    def wait_layer(self, layer: int) -> None:
        """Work that this thread does or launches from here on sees the layer's bytes.

        On CUDA the current stream waits, not the thread; on a CPU the thread waits. Raises
        WorkerError when the copy failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_moved > layer or self.error)
        if self._num_moved <= layer:
            raise WorkerError(f"copy failed before layer {layer} arrived: {self.error}")

    def wait(self) -> None:
        """Block this thread until every byte is there. Raises WorkerError when the copy failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_moved == self._num_layers or self.error)
        if self.error:
            raise WorkerError(f"copy failed: {self.error}")

    def layers_moved(self, count: int) -> None:
        with self._changed:
            self._num_moved += count
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.error = f"{type(error).__name__}: {error}"
            self._changed.notify_all()


class CopyEngine(Protocol):
    """Copies between one device pool and one host pool."""

    backup_pages: int
    """A backup of fewer pages costs more to start than to move: it may wait for others."""
    load_pages: int
    """Loads of fewer pages, if they came together, are better one copy."""
    how: str
    """What moves the pages, and why that; for people."""

    def load(self, host_pages: PageIds, device_pages: PageIds) -> Copy:
        """L2 → L1: device[i] becomes host[i].

        Work on the device pages launched before this call finishes reading them first.
        """

    def backup(self, device_pages: PageIds, host_pages: PageIds) -> Copy:
        """L1 → L2: host[i] becomes device[i], as written by work launched before this call."""

    def close(self) -> None:
        """Finish what is under way, then free the engine's threads and buffers."""
