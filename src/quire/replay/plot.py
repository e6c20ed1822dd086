"""The answer to "how much memory should I buy", as one picture: a PNG made from sweep.py's result.

    share found, by tier, under ideal LRU and Belady      where the curve flattens, it is enough
    time to the first token                               what a user feels of it
    what the next GiB brings                              what the next purchase is worth

matplotlib is loaded only here, and without a display.
"""

from __future__ import annotations

from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError
from quire.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = dict[str, Any]

_TIERS = {"device": "#1b7f5c", "host": "#56b4a0", "store": "#b7dfc9"}
_INK = "#22282e"
_ACCENT = "#c8553d"


def write(result: Result, path: Path) -> None:
    """Raises ConfigError when the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_ttft = result["profile"] is not None
    figure = Figure(figsize=(8, 9 if has_ttft else 7), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [3, 2, 1.5] if has_ttft else [3, 1.5]
    panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    _hits(result, panels[0])
    if has_ttft:
        _ttft(result, panels[1])
    _slopes(result, panels[-1])
    if result["enough_bytes"] is not None:
        for axes in panels:
            axes.axvline(log2(result["enough_bytes"]), color=_INK, linewidth=1, linestyle=":")
    trace = result["trace"]
    figure.suptitle(result["advice"], fontsize=11, fontweight="bold", x=0.01, ha="left")
    about = f"{trace['name']}, {trace['requests']:,} requests  ·  {result['write_policy']}"
    figure.supxlabel(f"{about}  ·  {result['in_use']:.0%} of the device in use", fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {str(path)!r} ({error}): give --plot a .png") from error


def _hits(result: Result, axes: Axes) -> None:
    points, at = result["points"], _places(result)
    base = [0.0] * len(points)
    for name, colour in _TIERS.items():
        top = [
            low + 100 * each["hit_by_tier"][name] for low, each in zip(base, points, strict=True)
        ]
        if top != base:
            axes.fill_between(at, base, top, color=colour, linewidth=0, label=f"found on {name}")
        base = top
    axes.plot(at, base, color=_INK, marker="o", linewidth=2, label="Quire")
    for name, label, style in (("ideal_lru", "ideal LRU", "--"), ("belady", "Belady", ":")):
        axes.plot(at, [100 * each[name] for each in points], style, color=_ACCENT, label=label)
    axes.axhline(100 * result["unlimited"], color="#9aa1a7", linewidth=1)
    axes.annotate(
        "a cache without limits", (at[0], 100 * result["unlimited"]), fontsize=8, va="bottom"
    )
    _dress(axes, "prompt blocks found, %")
    axes.legend(fontsize=8, loc="lower right", framealpha=0.9)


def _ttft(result: Result, axes: Axes) -> None:
    at = _places(result)
    for name, style in (("mean", "-"), ("p50", "--"), ("p95", ":")):
        times = [each["ttft_s"][name] for each in result["points"]]
        axes.plot(at, times, style, color=_ACCENT, marker="o", markersize=4, label=name)
    _dress(axes, "time to first token, s")
    axes.legend(frameon=False, fontsize=8)


def _slopes(result: Result, axes: Axes) -> None:
    """One step per interval between two sizes."""
    at = _places(result)
    slopes = [100 * each["next_gib"]["hit"] for each in result["points"][:-1]]
    if slopes:
        axes.stairs(slopes, at, color=_INK, fill=True, alpha=0.6)
    _dress(axes, "next GiB brings, %")
    axes.set_xlabel(f"size of the {result['varied']}")
    axes.set_xticks(at, [format_bytes(each["bytes"]) for each in result["points"]], fontsize=8)


def _places(result: Result) -> list[float]:
    """Sizes on a logarithmic scale, one step per doubling."""
    return [log2(max(each["bytes"], 1)) for each in result["points"]]


def _dress(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
