"""MoverKind: what may move pages between a CUDA device and the host. Knows no torch."""

from __future__ import annotations

import enum


class MoverKind(enum.StrEnum):
    AUTO = "auto"
    """The fastest, as measured at start, that leaves the model alone."""
    RECTANGLES = "rectangles"
    """The device's copy engines: some layers of a page per command."""
    PIECES = "pieces"
    """The device's copy engines: all pages of some layers per call."""
    STAGED = "staged"
    """The device's copy engines, between the host and a buffer on the device; a kernel does the
    rest, on the device."""
    KERNEL = "kernel"
    """One kernel reads and writes both ends itself."""
    INDEX = "index"
    """torch gathers into a buffer on the device and scatters from there: runs everywhere."""
