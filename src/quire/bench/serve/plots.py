"""Pictures of `quire bench serve`, to be read at a glance. Made from its result, PNG files.

    ttft_by_round.png    how long the first token takes, turn by turn, with every request
    hits_by_round.png    where the prompt's tokens came from, turn by turn
    ttft_by_length.png   first token over the prompt's length, coloured by the cached share

The first and the last also show what it would be without the cache: each request as it was, and
the time to compute what it found, at the best speed of those requests of the same run that computed
most of their prompt. That is rather too little: they would have waited longer for each other, too.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.bench import Result
from quire.bench.plots import draw
from quire.bench.serve.report import describe, hit_names
from quire.bench.stats import percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LOOKS = {
    "device": ("device memory", "#1b7f5c"),
    "host": ("host memory", "#56b4a0"),
    "store": ("store", "#b7dfc9"),
    "peer": ("another server", "#7a9cc6"),
    "cached": ("cached", "#56b4a0"),
    "computed": ("computed", "#d9d4cc"),
}
"""Where a token came from: in words, and the colour."""
_INK = "#22282e"
_ACCENT = "#c8553d"
_PALE = "#8a8f94"
_UNCACHED = "without the cache (estimate)"
_MOSTLY = 0.5
"""Of its prompt, which a request has computed at least if it is to say how long computing takes."""


def write(result: Result, folder: Path) -> list[Path]:
    """Raises ConfigError."""
    pictures = {
        "ttft_by_round.png": partial(_ttft_by_round, result),
        "hits_by_round.png": partial(_hits_by_round, result),
        "ttft_by_length.png": partial(_ttft_by_length, result),
    }
    return draw(pictures, folder, f"{result['model']}  ·  {describe(result)}")


def _good(result: Result) -> list[Result]:
    return [s for s in result["samples"] if s["verdict"] == "good" and s["ttft_s"] is not None]


def seconds_per_token(samples: list[Result]) -> float | None:
    """Of computing a prompt, the least of the requests that computed most of theirs, since others
    had to wait; None: there were none, or the server does not say."""
    found = []
    for sample in samples:
        share = _cached_share(sample)
        if share is not None and share <= 1 - _MOSTLY:
            found.append(sample["ttft_s"] / (sample["prompt_tokens"] * (1 - share)))
    return min(found, default=None)


def uncached_s(sample: Result, rate: float) -> float:
    """Time to the first token if what was found had been computed."""
    return float(sample["ttft_s"] + rate * sum((sample["cached"] or {}).values()))


def _ttft_by_round(result: Result, axes: Axes) -> None:
    chance = random.Random(0)
    samples = _good(result)
    rounds = sorted({sample["round"] for sample in samples})
    by_round = [[sample for sample in samples if sample["round"] == number] for number in rounds]

    def line(share: float) -> list[float]:
        return [percentile([sample["ttft_s"] for sample in own], share) for own in by_round]

    low, high = line(0.25), line(0.75)
    axes.fill_between(rounds, low, high, color=_ACCENT, alpha=0.12, lw=0, label="half of them")
    axes.plot(rounds, line(0.5), color=_ACCENT, marker="o", linewidth=2, label="median")
    axes.plot(
        rounds, line(0.9), color=_ACCENT, linestyle="--", linewidth=1, label="nine in ten are below"
    )
    rate, uncached = seconds_per_token(samples), []
    if rate is not None:
        uncached = [percentile([uncached_s(each, rate) for each in own], 0.5) for own in by_round]
        axes.plot(rounds, uncached, color=_PALE, linestyle=":", linewidth=2, label=_UNCACHED)
    spread = [sample["round"] + chance.uniform(-0.18, 0.18) for sample in samples]
    values = [sample["ttft_s"] for sample in samples]
    axes.scatter(spread, values, s=14, color=_INK, alpha=0.35, linewidths=0, label="one request")
    axes.set_title("Time to first token, turn by turn", loc="left", fontweight="bold")
    axes.set_xlabel("turn of the conversation")
    _seconds(axes, max(values + uncached))
    _whole_numbers(axes, rounds)
    axes.legend(frameon=False)


def _hits_by_round(result: Result, axes: Axes) -> None:
    axes.set_title("Where the prompt's tokens came from", loc="left", fontweight="bold")
    known = [row for row in result["rounds"] if row["hit"] is not None]
    if not known:
        _unknown(axes, "what it found in its cache")
        return
    rounds = [row["round"] for row in known]
    hits = [row["hit"] | {"computed": 1 - row["hit"]["all"]} for row in known]
    base = [0.0] * len(known)
    layers = [*(tier for tier, _ in hit_names(result["hit"])), "computed"]
    for tier in layers:
        shares = [100 * found.get(tier, 0.0) for found in hits]
        words, colour = _LOOKS[tier]
        bars = axes.bar(rounds, shares, bottom=base, color=colour, width=0.7, label=words)
        labels = [f"{share:.0f} %" if share >= 6 else "" for share in shares]
        ink = "white" if tier == "device" else _INK
        axes.bar_label(bars, labels, label_type="center", fontsize=8, color=ink)
        base = [low + share for low, share in zip(base, shares, strict=True)]
    axes.set_xlabel("turn of the conversation")
    axes.set_ylabel("share of prompt tokens, %")
    axes.set_ylim(0, 100)
    _whole_numbers(axes, rounds)
    axes.figure.legend(loc="outside upper right", ncols=len(layers), frameon=False, fontsize=9)


def _ttft_by_length(result: Result, axes: Axes) -> None:
    axes.set_title("Time to first token by length of prompt", loc="left", fontweight="bold")
    samples = [sample for sample in _good(result) if sample["prompt_tokens"]]
    if not samples:
        _unknown(axes, "how long the prompts were")
        return
    lengths = [sample["prompt_tokens"] for sample in samples]
    times = [sample["ttft_s"] for sample in samples]
    shares = [100 * share for each in samples if (share := _cached_share(each)) is not None]
    if len(shares) < len(samples):
        axes.scatter(lengths, times, s=22, color=_INK, alpha=0.6, linewidths=0)
    else:
        points = axes.scatter(
            lengths, times, c=shares, cmap="viridis", vmin=0, vmax=100, s=26, edgecolors="none"
        )
        axes.figure.colorbar(points, ax=axes, label="of the prompt found in the cache, %")
    rate = seconds_per_token(samples)
    if rate is not None:
        uncached = [uncached_s(sample, rate) for sample in samples]
        axes.scatter(lengths, uncached, s=22, marker="x", color=_PALE, label=_UNCACHED)
        axes.legend(frameon=False, loc="upper left")
        times += uncached
    axes.set_xlabel("prompt, tokens")
    axes.set_xlim(left=0)
    _seconds(axes, max(times))


def _cached_share(sample: Result) -> float | None:
    cached, num_tokens = sample["cached"], sample["prompt_tokens"]
    return None if cached is None or not num_tokens else sum(cached.values()) / num_tokens


def _unknown(axes: Axes, what: str) -> None:
    axes.text(0.5, 0.5, f"The server does not say {what}.", ha="center")
    axes.set_axis_off()


def _seconds(axes: Axes, largest: float) -> None:
    axes.set_ylabel("time to first token, s")
    axes.set_ylim(0, largest * 1.08)


def _whole_numbers(axes: Axes, rounds: list[int]) -> None:
    step = max(1, len(rounds) // 15)
    axes.set_xticks(rounds[::step])
