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
