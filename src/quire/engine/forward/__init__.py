"""How a rank computes its model: `choose` between our own decoder and transformers' modules.

base.py (protocol); dense.py, with spec.py, rope.py and weights.py, over ops.py or, on CUDA,
fused.py and graphs.py (opening.py says which); transformers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from quire.engine.config import ForwardKind
from quire.engine.forward.base import Forward
from quire.errors import ConfigError

__all__ = ["Choice", "Forward", "choose"]


class Choice(NamedTuple):
    kind: ForwardKind
    """Never AUTO."""
    reason: str = ""
    """Why it is transformers although nobody asked for it."""


def choose(directory: Path, wanted: ForwardKind) -> Choice:
    """Raises ConfigError if `wanted` cannot be, and ModelError if there is no model."""
    from quire.engine.forward.dense import why_not_dense

    if wanted is ForwardKind.TRANSFORMERS:
        return Choice(wanted)
    reason = why_not_dense(directory)
    if reason is None:
        return Choice(ForwardKind.DENSE)
    if wanted is ForwardKind.DENSE:
        raise ConfigError(f"forward is dense, but {reason}: set it to auto")
    return Choice(ForwardKind.TRANSFORMERS, reason)
