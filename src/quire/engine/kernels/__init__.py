"""Fused kernels in Triton, for CUDA: one file each, a Python function beside its kernel.

norm.py (residual + RMS norm), positions.py (norms and positions of heads, and their way into
pages), append.py (keys and values into pages), decode.py (few queries of a sequence over its
pages), merge.py (attention over two sets of keys), activation.py, scatter.py (rows into slots); for
drawing, in this order: histories.py, masses.py, candidates.py, sampling.py, likeliest.py, over
rows.py. They know tensors; neither models nor batches.

Inside a kernel everything is float32; what it writes is rounded once. Nothing here may be imported
before `available` has said yes: an installation for CPUs has no Triton.
"""

from __future__ import annotations

import importlib.util


def available() -> bool:
    """Whether the kernels can be imported."""
    return importlib.util.find_spec("triton") is not None
