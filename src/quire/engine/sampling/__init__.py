"""From logits to tokens: what is drawn (base.py), on the host (on_host.py), on the device
(on_device.py, slots.py, and the kernels in engine/kernels/sampling.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.engine import kernels
from quire.engine.sampling.base import Drawn, Row, Sampled, Sampler, needs_history, uniform
from quire.engine.sampling.on_host import HostSampler, sample

if TYPE_CHECKING:
    import torch

__all__ = [
    "Drawn",
    "Row",
    "Sampled",
    "Sampler",
    "needs_history",
    "open_sampler",
    "sample",
    "uniform",
]


def open_sampler(
    device: torch.device, vocab_size: int, max_rows: int, dtype: torch.dtype | None = None
) -> Sampler:
    """The fastest there is for this device. On CUDA it takes its memory now, ten bytes for each
    token of the vocabulary and row, and no more later. `dtype`: of the logits; what has to be
    compiled for them is compiled now."""
    if device.type != "cuda" or not kernels.available():
        return HostSampler()
    from quire.engine.sampling.on_device import DeviceSampler

    sampler = DeviceSampler(device, vocab_size, max_rows)
    if dtype is not None:
        sampler.warm_up(dtype)
    return sampler
