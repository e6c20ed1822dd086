"""Figures from samples: percentiles, and the ratio of two paired series with its uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BOOTSTRAP_SAMPLES = 4000
CONFIDENCE = 0.95

_Series = npt.NDArray[np.float64]
_ESTIMATES: dict[str, Callable[[_Series, _Series], _Series]] = {
    "of_medians": lambda ours, theirs: np.median(ours, axis=-1) / np.median(theirs, axis=-1),
    "of_means": lambda ours, theirs: np.mean(ours, axis=-1) / np.mean(theirs, axis=-1),
    # What changes slowly cancels in each pair, and what hit only one is left out.
    "of_pairs": lambda ours, theirs: np.median(ours / theirs, axis=-1),
}


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours; 0.5 is the median."""
    return float(np.quantile(values, share))


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """None when there is nothing to sum up."""
    if not values:
        return None
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "min": 0.0, "max": 1.0}
    found = {name: percentile(values, share) for name, share in shares.items()}
    return {"mean": float(np.mean(values))} | found


def ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> dict[str, Any]:
    """How much larger `ours` is than `theirs`, pair by pair measured next to each other.

    Whole pairs are drawn again and again, so that what disturbed both sides of a pair cancels.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError("a ratio needs two series of the same length, with at least one value")
    pairs = np.array([ours, theirs], dtype=np.float64)
    chance = np.random.default_rng(seed)
    drawn = pairs[:, chance.integers(len(ours), size=(BOOTSTRAP_SAMPLES, len(ours)))]
    tail = (1 - CONFIDENCE) / 2
    found: dict[str, Any] = {"confidence": CONFIDENCE}
    for name, estimate in _ESTIMATES.items():
        low, high = np.quantile(estimate(*drawn), (tail, 1 - tail))
        found[name] = {"ratio": float(estimate(*pairs)), "low": float(low), "high": float(high)}
    return found
