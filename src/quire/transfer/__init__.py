"""Device↔host copy engines: the protocol, and the factory that picks one for a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.transfer.base import Copy, CopyEngine, CopyState

if TYPE_CHECKING:
    from quire.memory.device import DevicePool
    from quire.memory.host import HostPool

__all__ = ["Copy", "CopyEngine", "CopyState", "open_copy_engine"]


def open_copy_engine(device: DevicePool, host: HostPool) -> CopyEngine:
    """The engine for where `device` lives. On CUDA the host pool must be pinned."""
    if device.device.type == "cuda":
        from quire.transfer.cuda import CudaCopyEngine

        return CudaCopyEngine(device, host)
    from quire.transfer.cpu import CpuCopyEngine

    return CpuCopyEngine(device, host)
