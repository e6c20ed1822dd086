"""Attention backends: `open_attention` finds one by name. Room for faster ones beside `torch`."""

from __future__ import annotations

from quire.engine.attention.base import AttentionBackend, Packing, Span, Target, pack
from quire.errors import ConfigError
from quire.memory.device import DevicePool

__all__ = ["AttentionBackend", "Packing", "Span", "Target", "open_attention", "pack"]


def open_attention(name: str, pool: DevicePool, window: int = 0) -> AttentionBackend:
    """For layers that see a window of so many tokens, or all of them (0).

    Raises ConfigError for a name nobody knows.
    """
    if name == "torch":
        from quire.engine.attention.torch import TorchAttention

        return TorchAttention(pool, window)
    raise ConfigError(f"attention backend {name!r} is not known: use torch")
