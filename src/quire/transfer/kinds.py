"""MoverKind: what may move pages between a CUDA device and the host. Knows no torch."""

from __future__ import annotations

import enum


class MoverKind(enum.StrEnum):
    AUTO = "auto"
    """The fastest, as measured at start."""
    INDEX = "index"
    """torch gathers into a buffer on the device and scatters from there: runs everywhere."""
    KERNEL = "kernel"
    """One kernel reads and writes both ends itself."""
    DMA = "dma"
    """The device's copy engines move rectangles: no compute units."""
