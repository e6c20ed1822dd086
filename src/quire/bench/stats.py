"""Figures from samples: percentiles, and the ratio of two paired series with its uncertainty."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

BOOTSTRAP_SAMPLES = 4000
CONFIDENCE = 0.95

Pairs = Sequence[tuple[float, float]]
Estimate = Callable[[Pairs], float]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between neighbours; 0.5 is the median."""
    return float(np.quantile(values, share))


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """None when there is nothing to sum up."""
    if not values:
        return None
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "min": 0.0, "max": 1.0}
    found = {name: percentile(values, share) for name, share in shares.items()}
    return {"mean": statistics.fmean(values)} | found


def ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> dict[str, Any]:
    """How much larger `ours` is than `theirs`, pair by pair measured next to each other.

    Whole pairs are drawn again and again, so that what disturbed both sides of a pair cancels.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError("a ratio needs two series of the same length, with at least one value")
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "of_medians": _with_interval(pairs, _of_middles(statistics.median), seed),
        "of_means": _with_interval(pairs, _of_middles(statistics.fmean), seed),
        "of_pairs": _with_interval(pairs, _of_pairs, seed),
        "confidence": CONFIDENCE,
    }


def paired(ratios: Sequence[float]) -> list[float]:
    """One for each two rounds, in which the other side went first: their geometric mean, in which
    what being first is worth falls out. Of an odd number the last is left out; one is all there
    is."""
    pairs = zip(ratios[::2], ratios[1::2], strict=False)
    return [math.sqrt(first * second) for first, second in pairs] or list(ratios)


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third."""
    return [percentile(values, 0.25), percentile(values, 0.75)]


def _of_middles(middle: Callable[[list[float]], float]) -> Estimate:
    return lambda pairs: middle([a for a, _ in pairs]) / middle([b for _, b in pairs])


def _of_pairs(pairs: Pairs) -> float:
    """The median pair: what changes slowly cancels in each, and what hit only one is left out."""
    return statistics.median(a / b for a, b in pairs)


def _with_interval(pairs: Pairs, of: Estimate, seed: int) -> dict[str, float]:
    chance = random.Random(seed)
    drawn = [of(chance.choices(pairs, k=len(pairs))) for _ in range(BOOTSTRAP_SAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    return {
        "ratio": of(pairs),
        "low": percentile(drawn, tail),
        "high": percentile(drawn, 1 - tail),
    }
