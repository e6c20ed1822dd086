"""Pictures of `quire bench gpu`, PNG files, of the parts that were measured.

decoding.png      ms from token to token beside the floor
hits.png          first token over the prompt's length, by where the prompt was
crossover.png     first token over the store's speed: computing, fetching, both, the choice
sets_ttft.png     first token, round by round, by tiers; the set that does not fit
sets_hits.png     what of the prompts was reused, the same way
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench import Result
from quire.bench.gpu.plan import GpuPart
from quire.bench.plots import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_COLOURS = {"nowhere": "#6b7278", "device": "#1b7f5c", "host": "#c8553d", "store": "#7a9cc6"}
_OF_TIERS = {
    "L1": "#6b7278",
    "L1+L2": "#c8553d",
    "L1+half L2": "#d9a441",
    "L1+half L2+L3": "#7a9cc6",
}


def write(result: Result, folder: Path) -> list[Path]:
    """Raises ConfigError."""
    pictures: dict[str, tuple[GpuPart, Callable[[Any, Axes], None]]] = {
        "decoding.png": (GpuPart.DECODE, _decoding),
        "hits.png": (GpuPart.HITS, _hits),
        "crossover.png": (GpuPart.CROSSOVER, _crossover),
        "sets_ttft.png": (GpuPart.SETS, _sets_ttft),
        "sets_hits.png": (GpuPart.SETS, _sets_hits),
    }
    measured = {
        name: partial(picture, result[part.value])
        for name, (part, picture) in pictures.items()
        if part.value in result
    }
    caption = f"{result['shape']}, random weights, on {result['machine']['name']}"
    return draw(measured, folder, caption)


def _decoding(rows: list[Result], axes: Axes) -> None:
    places = range(len(rows))
    axes.bar(places, [row["greedy_ms"] for row in rows], color="#56b4a0", label="engine")
    floors = [row["floor_ms"] for row in rows]
    axes.bar(places, floors, color="#1b7f5c", label="floor: bytes over bandwidth")
    labels = [f"{row['batch']} × {row['context']:,}\n{row['share_of_floor']:.0%}" for row in rows]
    axes.set_xticks(list(places), labels)
    axes.set_title("Decoding: ms from token to token", loc="left", fontweight="bold")
    axes.set_xlabel("requests × context, and the share of the floor")
    axes.legend(frameon=False)


def _hits(rows: list[Result], axes: Axes) -> None:
    lengths = [row["tokens"] for row in rows]
    for where, figure in (
        ("nowhere", "computed_ms"),
        ("store", "store_ms"),
        ("host", "host_ms"),
        ("device", "device_ms"),
    ):
        values = [row.get(figure, math.nan) for row in rows]
        axes.plot(lengths, values, marker="o", linewidth=2, color=_COLOURS[where], label=where)
    floors = [row["floor_ms"] for row in rows]
    axes.plot(lengths, floors, linestyle="--", color=_COLOURS["host"], label="host's floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_title("First token by where the prompt was, ms", loc="left", fontweight="bold")
    axes.set_xlabel("tokens of the prompt")
    axes.legend(frameon=False)


def _crossover(found: Result, axes: Axes) -> None:
    rates = [row["bytes_s"] / 1e9 for row in found["rows"]]
    for way, colour in (
        ("compute", _COLOURS["nowhere"]),
        ("fetch", _COLOURS["store"]),
        ("both", _COLOURS["device"]),
    ):
        values = [row[f"{way}_ms"] for row in found["rows"]]
        axes.plot(rates, values, marker="o", linewidth=2, color=colour, label=way)
    chosen = [row["chosen_ms"] for row in found["rows"]]
    axes.scatter(rates, chosen, s=120, facecolors="none", edgecolors="#c8553d", label="chosen")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_title("A prompt in the store: first token, ms", loc="left", fontweight="bold")
    axes.set_xlabel("GB/s that the store gives at most")
    axes.legend(frameon=False)


def _sets_ttft(rows: list[Result], axes: Axes) -> None:
    _by_round(rows, axes, lambda one: one["ttft_s"] * 1e3)
    axes.set_title("First token, round by round, ms", loc="left", fontweight="bold")


def _sets_hits(rows: list[Result], axes: Axes) -> None:
    _by_round(rows, axes, lambda one: 100 * one["hit"])
    axes.set_title("Reused of the prompts, round by round, %", loc="left", fontweight="bold")


def _by_round(rows: list[Result], axes: Axes, value: Callable[[Result], float]) -> None:
    """Of the sets that do not fit with whole lines, of those that do with broken ones."""
    for row in rows:
        fits = row["times_device"] <= 1
        numbers = range(1, len(row["rounds"]) + 1)
        axes.plot(
            numbers,
            [value(one) for one in row["rounds"]],
            marker="o",
            linewidth=1 if fits else 2,
            linestyle="--" if fits else "-",
            color=_OF_TIERS[row["tiers"]],
            label=f"{row['tiers']}, set {row['times_device']:.1f} × the device",
        )
        axes.set_xticks(list(numbers))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round")
    axes.legend(frameon=False)
