"""How a rank computes its model: `choose` between our own decoder and transformers' modules.

base.py (protocol); dense.py, with spec.py, rope.py and dense_weights.py, over ops.py or, on CUDA,
fused.py and graphs.py (assembly.py says which); transformers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from quire.engine.config import ForwardKind
from quire.engine.forward.base import Forward
from quire.errors import ConfigError

__all__ = ["Forward", "ForwardChoice", "choose"]


class ForwardChoice(NamedTuple):
    kind: ForwardKind
    """Never AUTO."""
    reason: str = ""
    """Why it is transformers although nobody asked for it."""


def choose(directory: Path, wanted: ForwardKind) -> ForwardChoice:
    """Raises ConfigError if `wanted` cannot be, and ModelError if there is no model."""
    from quire.engine.forward.dense import why_not_dense

    if wanted is ForwardKind.TRANSFORMERS:
        return ForwardChoice(wanted)
    reason = why_not_dense(directory)
    if reason is None:
        return ForwardChoice(ForwardKind.DENSE)
    if wanted is ForwardKind.DENSE:
        raise ConfigError(f"forward is dense, but {reason}: set it to auto")
    return ForwardChoice(ForwardKind.TRANSFORMERS, reason)
