"""What was heard, as figures: each side by itself, and sides by each other with their intervals.

Asked of them (`asked`): what a decode-side cache is published to save, and how far a hand-over may
be from doing everything in one engine.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from evidence.disagg.turns import Asked
from evidence.pd.plan import UNIFIED, Plan, side_name
from evidence.pd.rounds import Found
from quire.bench.stats import CONFIDENCE, percentile, summary
from quire.engine.messages import CachedTokens, HandoverStatus
from quire.peer.kinds import TransportKind

_DRAWN = 2000
PUBLISHED = {"ttft_mean": 0.61, "ttft_p99": 0.48, "tpot_mean": 1.025}
"""On by off, later turns: −39 %, −52 %, +2.5 %."""
UNIFIED_MOST = 1.3
"""Mean first token of a decode engine with its cache, by that of a unified one."""
SHARE_OF_COPY = 0.85

Result = dict[str, Any]
Of = Callable[[list[float]], float]


def of_sides(found: Found) -> Result:
    return {
        str(added): {side.name: _side(heard.asked) for side, heard in sides.items()}
        for added, sides in found.items()
    }


def _side(asked: list[Asked]) -> Result:
    later = later_of(asked)
    cached = {
        name: sum(getattr(one.cached, name) for one in asked)
        for name in CachedTokens.__struct_fields__
    }
    return {
        "turns": len(asked),
        "later_turns": len(later),
        "ttft_s": summary([one.ttft_s for one in asked]),
        "ttft_later_s": summary([one.ttft_s for one in later]),
        "tpot_later_s": summary([one.tpot_s for one in later]),
        "prompt_tokens": sum(one.prompt_tokens for one in asked),
        "cached_tokens": {name: count for name, count in cached.items() if count},
    }


def later_of(asked: list[Asked]) -> list[Asked]:
    """All but first turns, of which no side has anything."""
    return [one for one in asked if one.turn > 0]


def compared(plan: Plan, found: Found) -> Result:
    """By new tokens of a turn, then by pair of sides."""
    result: Result = {}
    for added, sides in found.items():
        named = {side.name: heard.asked for side, heard in sides.items()}
        pairs = {}
        for transport in plan.transports:
            on, off = (side_name(transport, has_cache=has) for has in (True, False))
            pairs[f"{on} / {off}"] = _pair(named[on], named[off])
            pairs[f"{on} / {UNIFIED}"] = _pair(named[on], named[UNIFIED])
            pairs[f"{off} / {UNIFIED}"] = _pair(named[off], named[UNIFIED])
        result[str(added)] = pairs
    return result


def _pair(ours: list[Asked], theirs: list[Asked]) -> Result:
    count = min(len(ours), len(theirs))  # a round may have been cut short
    ours, theirs = ours[:count], theirs[:count]
    later = list(zip(later_of(ours), later_of(theirs), strict=True))
    whole = list(zip(ours, theirs, strict=True))
    return {
        "later_turns": _ratios(later),
        "all_turns": _ratios(whole),
    }


def _ratios(pairs: list[tuple[Asked, Asked]]) -> Result | None:
    if not pairs:
        return None
    ttft = [(ours.ttft_s, theirs.ttft_s) for ours, theirs in pairs]
    tpot = [(ours.tpot_s, theirs.tpot_s) for ours, theirs in pairs]
    return {
        "pairs": len(pairs),
        "ttft_mean": with_interval(ttft, statistics.fmean),
        "ttft_p99": with_interval(ttft, lambda values: percentile(values, 0.99)),
        "tpot_mean": with_interval(tpot, statistics.fmean),
    }


def with_interval(pairs: Sequence[tuple[float, float]], of: Of, seed: int = 0) -> Result:
    """A figure of the first by that of the second; whole pairs are drawn again and again."""

    def ratio(drawn: Sequence[tuple[float, float]]) -> float:
        return of([a for a, _ in drawn]) / max(1e-9, of([b for _, b in drawn]))

    chance = random.Random(seed)
    found = [ratio(chance.choices(pairs, k=len(pairs))) for _ in range(_DRAWN)]
    tail = (1 - CONFIDENCE) / 2
    return {
        "ratio": ratio(pairs),
        "low": percentile(found, tail),
        "high": percentile(found, 1 - tail),
    }


def of_handovers(before: HandoverStatus, after: HandoverStatus) -> Result:
    """What came while all was asked."""
    count = after.transfers.count - before.transfers.count
    seconds = after.transfers.seconds - before.transfers.seconds
    return {
        "received_bytes": after.received_bytes - before.received_bytes,
        "received_by": {
            name: size - before.received_by.get(name, 0) for name, size in after.received_by.items()
        },
        "handovers": count,
        "mean_s": seconds / count if count else None,
        "repairs": after.repairs,
        "local": after.local,
    }


def beside_copy(found: Result, copy_bytes_s: float) -> Result:
    """Rates by transport, as shares of that of a plain copy to the device."""
    return {
        transport: row | {"of_copy": row["bytes_s"] / copy_bytes_s}
        for transport, row in found.items()
    }


def asked_of(plan: Plan, result: Result) -> list[Result]:
    """Each thing asked, with what was found and whether the whole interval says so; None: it
    cannot be said."""
    rows = []
    for added in plan.added:
        for transport in plan.transports:
            rows += _asked_of_pair(plan, result["compared"].get(str(added)), added, transport)
    shm = result["bytes"].get(TransportKind.SHM.value)
    if shm is not None:
        rows.append(
            {
                "what": "bytes through shared memory to the device, by a plain copy there",
                "found": shm["of_copy"],
                "asked": f"at least {SHARE_OF_COPY}",
                "met": shm["of_copy"] >= SHARE_OF_COPY,
            }
        )
    return rows


def _asked_of_pair(
    plan: Plan, pairs: Result | None, added: int, transport: TransportKind
) -> list[Result]:
    """The published figures are for few new tokens over a network; elsewhere: never worse."""
    if pairs is None:
        return []
    on, off = (side_name(transport, has_cache=has) for has in (True, False))
    names = f"{added} new, {on} / {off}"
    whole, later = (pairs[f"{on} / {off}"][part] for part in ("all_turns", "later_turns"))
    is_published = transport is TransportKind.TCP and added == min(plan.added)
    rows = [
        _row(f"{names}, later turns: {name}", later, name, most if is_published else max(1.0, most))
        for name, most in PUBLISHED.items()
    ]
    single = pairs[f"{on} / {UNIFIED}"]["later_turns"]
    return [
        *rows,
        _row(f"{names}, all turns: ttft_p99", whole, "ttft_p99", 1.0),
        _row(
            f"{added} new, {on} / unified, later turns: ttft_mean",
            single,
            "ttft_mean",
            UNIFIED_MOST,
        ),
    ]


def _row(what: str, part: Result | None, name: str, most: float) -> Result:
    if part is None:
        return {"what": what, "found": None, "asked": f"at most {most:g}", "met": None}
    found = part[name]
    met = True if found["high"] <= most else False if found["low"] > most else None
    return {"what": what, "found": found, "asked": f"at most {most:g}", "met": met}
