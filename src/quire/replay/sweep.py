"""sweep(): one trace at several sizes of one tier, beside what any cache of that size could do.

Its result is plain data: report.py and plot.py show it, `--json` prints it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire.progress import Progress
from quire.replay.bounds import Belady, IdealLru, hits_of
from quire.replay.profile import Profile
from quire.replay.run import Outcome, ReplayOptions, replay
from quire.replay.trace import Trace
from quire.sizes import format_bytes

Result = dict[str, Any]
"""Called with (what, done, total)."""

GIB = 1 << 30
ENOUGH = 0.95
"""Of what the largest size finds: more is hard to justify."""


class SizedTier(enum.Enum):
    """Whose size is varied."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


def sweep(
    trace: Trace,
    base: ReplayOptions,
    pages: Sequence[int],
    *,
    tier: SizedTier,
    page_bytes: int,
    profile: Profile | None,
    progress: Progress = lambda *_: None,
) -> Result:
    """`base` with each of these numbers of pages for the tier. Raises ConfigError."""
    points = []
    for count in sorted(set(pages)):
        options = _sized(base, tier, count)
        size = format_bytes(count * page_bytes)
        if options.device_pages <= trace.largest:
            least = format_bytes((trace.largest + 1) * page_bytes)
            raise ConfigError(
                f"the device has {options.device_pages} pages and the longest request needs "
                f"{trace.largest}: give it {least} at least"
            )

        def done(number: int, size: str = size) -> None:
            progress(f"{tier.value} {size}", number, len(trace.rows))

        outcome = replay(trace, options, done)
        point: Result = {"pages": count, "bytes": count * page_bytes} | _found(
            trace, options, outcome
        )
        point["ttft_s"] = None if profile is None else _ttft(trace, outcome, profile)
        points.append(point)
    _add_slopes(points)
    enough = next(each for each in points if each["hit"] >= ENOUGH * points[-1]["hit"])
    everything = hits_of(IdealLru(), trace, lambda _: trace.num_distinct)
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace.rows),
            "seconds": trace.duration_s,
            "asked_pages": trace.num_asked,
            "distinct_pages": trace.num_distinct,
            "block_tokens": trace.block_tokens,
        },
        "page_bytes": page_bytes,
        "device_pages": base.device_pages,
        "host_pages": base.host_pages,
        "store_pages": base.store_pages,
        "varied": tier.value,
        "in_use": base.occupancy.in_use,
        "burst": base.occupancy.burst,
        "write_policy": base.write_policy.value,
        "unlimited": everything / trace.num_asked,
        "points": points,
        "profile": None if profile is None else msgspec.to_builtins(profile),
        "enough_bytes": None if enough is points[-1] else enough["bytes"],
        "advice": _advice(enough, points[-1], tier),
    }


def _sized(base: ReplayOptions, tier: SizedTier, count: int) -> ReplayOptions:
    match tier:
        case SizedTier.DEVICE:
            return replace(base, device_pages=count)
        case SizedTier.HOST:
            return replace(base, host_pages=count)
        case SizedTier.STORE:
            return replace(base, store_pages=count)


def _found(trace: Trace, options: ReplayOptions, outcome: Outcome) -> Result:
    """Shares of the pages of all prompts."""
    asked, fitting = trace.num_asked, options.fitting(trace)
    by_tier = {
        name: sum(getattr(each, name) for each in outcome.found) / asked
        for name in ("device", "host", "store")
    }
    bounds = {
        name: hits_of(bound, fitting, options.room) / asked
        for name, bound in (("ideal_lru", IdealLru()), ("belady", Belady(fitting)))
    }
    hit = sum(by_tier.values())
    return {
        "hit": hit,
        "hit_by_tier": by_tier,
        **bounds,
        "of_ideal": hit / bounds["ideal_lru"] if bounds["ideal_lru"] else 1.0,
        "cut_requests": outcome.num_cut,
        "counters": outcome.counters,
    }


def _ttft(trace: Trace, outcome: Outcome, profile: Profile) -> dict[str, float]:
    """Also how many such machines the trace keeps busy with nothing but first tokens, and the share
    of prompts longer than any that was measured."""
    size = trace.block_tokens
    times = np.array(
        [
            profile.ttft_s(row.num_tokens, each.device * size, each.host * size, each.store * size)
            for row, each in zip(trace.rows, outcome.found, strict=True)
        ]
    )
    return {
        "mean": float(times.mean()),
        "p50": float(np.percentile(times, 50)),
        "p95": float(np.percentile(times, 95)),
        "machines": float(times.sum()) / (trace.duration_s or 1.0),
        "guessed": sum(row.num_tokens > profile.longest_tokens for row in trace.rows)
        / len(trace.rows),
    }


def _add_slopes(points: list[Result]) -> None:
    """What one GiB more brings, from each size to the next; none after the last."""
    for here, there in zip(points, [*points[1:], None], strict=True):
        if there is None:
            here["next_gib"] = None
            continue
        gib = (there["bytes"] - here["bytes"]) / GIB
        saved = None
        if here["ttft_s"] is not None:
            saved = (here["ttft_s"]["mean"] - there["ttft_s"]["mean"]) / gib
        here["next_gib"] = {"hit": (there["hit"] - here["hit"]) / gib, "saved_s": saved}


def _advice(enough: Result, last: Result, tier: SizedTier) -> str:
    if enough is last:
        return (
            f"{tier.value}: the largest size, {format_bytes(last['bytes'])}, is still worth it; "
            "try more"
        )
    return (
        f"{tier.value}: {format_bytes(enough['bytes'])} finds {enough['hit']:.1%} of the prompts' "
        f"blocks, {enough['hit'] / last['hit']:.0%} of what {format_bytes(last['bytes'])} finds"
    )
