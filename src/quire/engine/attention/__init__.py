"""Attention backends: `open_attention` finds one by name.

base.py (protocol, packing of a batch), torch.py, triton.py with prefixed.py; staging.py brings
small arrays to the device.
"""

from __future__ import annotations

from quire.engine.attention.base import AttentionBackend, BatchPacking, Heads, RowSpan, Target, pack
from quire.engine.config import AttentionKind
from quire.errors import ConfigError
from quire.memory.device import DevicePool

__all__ = [
    "AttentionBackend",
    "BatchPacking",
    "Heads",
    "RowSpan",
    "Target",
    "open_attention",
    "pack",
]


def open_attention(name: str, pool: DevicePool, window: int = 0) -> AttentionBackend:
    """For layers that see a window of so many tokens, or all of them (0).

    Raises ConfigError for a name nobody knows, and for one that cannot be here.
    """
    from quire.engine.attention.torch import TorchAttention
    from quire.engine.kernels import available

    if name not in list(AttentionKind):
        known = ", ".join(AttentionKind)
        raise ConfigError(f"attention backend {name!r} is not known: use one of {known}")
    on_cuda = pool.device.type == "cuda"
    if name == AttentionKind.TORCH or (
        name == AttentionKind.AUTO and not (on_cuda and available())
    ):
        return TorchAttention(pool, window)
    if not on_cuda:
        raise ConfigError(
            f"attention is triton, but the model runs on {pool.device.type} and its kernels are "
            "for CUDA: set it to auto"
        )
    if not available():
        raise ConfigError("attention is triton, but Triton is not installed: set it to auto")
    from quire.engine.attention.triton import TritonAttention

    return TritonAttention(pool, window)
