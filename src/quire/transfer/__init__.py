"""Device↔host copy engines: the protocol, and the factory that picks one for a device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from quire.transfer.base import Copy, CopyEngine, CopyState
from quire.transfer.kinds import MoverKind

if TYPE_CHECKING:
    from quire.memory.device import DevicePool
    from quire.memory.host import HostPool

__all__ = ["Copy", "CopyEngine", "CopyState", "MoverKind", "open_copy_engine"]

_logger = logging.getLogger(__name__)


def open_copy_engine(
    device: DevicePool, host: HostPool, kind: MoverKind = MoverKind.AUTO
) -> CopyEngine:
    """The engine for where `device` lives. On CUDA the host pool must be pinned, and what moves
    the pages is measured, unless `kind` says; neither pool may be in use yet."""
    if device.device.type == "cuda":
        from quire.transfer.choice import choose
        from quire.transfer.cuda import CudaCopyEngine, ends_of

        chosen = choose(ends_of(device, host), kind)
        _logger.info("copies of '%s': %s", device.layout.component, chosen.reason)
        return CudaCopyEngine(device, chosen)
    from quire.transfer.cpu import CpuCopyEngine

    return CpuCopyEngine(device, host)
