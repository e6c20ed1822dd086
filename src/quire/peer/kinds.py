"""How pages travel between engines, by name."""

from __future__ import annotations

import enum


class TransportKind(enum.StrEnum):
    AUTO = "auto"
    """Shared memory where both are on one machine, else TCP."""
    SHM = "shm"
    """Shared memory only: pages of engines elsewhere are not read."""
    TCP = "tcp"
    """TCP only, also on one machine; host memory is not shared."""
    NIXL = "nixl"
    """By NIXL, of those who have it too: RDMA and its like. Pages travel unencrypted."""

    @property
    def shares_memory(self) -> bool:
        """Are host pools to be where readers on this machine can map them?"""
        return self in (TransportKind.AUTO, TransportKind.SHM)
