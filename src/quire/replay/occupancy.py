"""Occupancy: how much of the device is in use by requests that run, and cannot hold cached pages.

share of the device
97 %            ┌───────┐
                │ burst │
in_use ─────────┘       └──────────
        0   begins     ends       1    of the trace's time
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Occupancy:
    in_use: float = 0.0
    """Share of the device, all the time."""
    burst: float = 0.0
    """Share of the device, for a while; 0: there is none."""
    begins: float = 0.4
    ends: float = 0.5

    def __post_init__(self) -> None:
        for name in ("in_use", "burst"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a share from 0 to 0.99")

    def pages(self, device_pages: int, progress: float) -> int:
        """In use when this share of the trace's time is over."""
        share = self.in_use
        if self.begins <= progress < self.ends:
            share = max(share, self.burst)
        return int(device_pages * share)
