"""What a copy engine promises. Knows no torch: results and protocols only.

A copy moves whole pages between one component's host and device pools and arrives layer by layer,
layer 0 first. Engines are asynchronous: load() and backup() return at once, on the step's thread,
and never wait for bytes. Several copies may be under way at once; the caller (the leader) makes
sure that no two of them write the same page and that nothing reads a page that is being written.

    RUNNING ──last layer arrived──▶ DONE
       └──────anything raised─────▶ FAILED      the destination pages hold rubbish
"""

from __future__ import annotations

import enum
from typing import Protocol

from quire.types import PageIds


class CopyState(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Copy(Protocol):
    """One load or backup under way."""

    @property
    def state(self) -> CopyState:
        """Asks the device, without waiting."""

    @property
    def error(self) -> str:
        """Why it failed; empty otherwise."""

    @property
    def seconds(self) -> float:
        """Time the bytes took to move, once `state` has said DONE."""

    def layer_done(self, layer: int) -> bool:
        """Have all pages of this layer (and so of every earlier one) arrived?"""

    def wait_layer(self, layer: int) -> None:
        """Work that this thread does or launches from here on sees the layer's bytes.

        On CUDA the current stream waits, not the thread; on a CPU the thread waits. Raises
        WorkerError when the copy failed.
        """

    def wait(self) -> None:
        """Block this thread until every byte is there. Raises WorkerError when the copy failed."""


class CopyEngine(Protocol):
    """Copies between one device pool and one host pool."""

    def load(self, host_pages: PageIds, device_pages: PageIds) -> Copy:
        """L2 → L1: device[i] becomes host[i].

        Work on the device pages launched before this call finishes reading them first.
        """

    def backup(self, device_pages: PageIds, host_pages: PageIds) -> Copy:
        """L1 → L2: host[i] becomes device[i], as written by work launched before this call."""

    def close(self) -> None:
        """Finish what is under way, then free the engine's threads and buffers."""
