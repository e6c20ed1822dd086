"""What `quire bench peers` shows: a table, and a plot of the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from quire.bench import Result
from quire.bench.peers.run import ALONE, LMCACHE, QUIRE
from quire.bench.plots import draw
from quire.bench.report import Show, interval, table
from quire.sizes import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {
    "new": "never seen",
    "again": "host",
    "batch": "several, never seen",
    "first turn": "session, first turn",
    "turn": "session, later turn",
    "restart": "after a restart",
}
_SHORT = {ALONE: "alone", QUIRE: "Quire", LMCACHE: "LMCache"}


def tables(result: Result) -> list[RenderableType]:
    sides = list(result["max_rss_bytes"])
    others = [side for side in sides if side != QUIRE]
    shown = table(
        "vLLM alone and with a cache behind it, seconds to an answer of one token",
        result["cases"],
        [
            ("prompt", lambda case: _NAMES[case["what"]]),
            ("tokens", _tokens),
            *((_SHORT[side], _seconds(side)) for side in sides),
            *((f"Quire / {_SHORT[side]}", _ratio(side)) for side in others),
            ("reused", lambda case: " ".join(str(case["reused"][s]) for s in sides if s != ALONE)),
            ("same", _same),
        ],
        wraps=True,
    )
    memory = ", ".join(f"{_SHORT[s]} {format_bytes(n)}" for s, n in result["max_rss_bytes"].items())
    note = (
        f"{result['rounds']} rounds, {result['sessions']} sessions; medians; ratios: median of "
        "pairs, with its 95 % interval. "
        f"Largest memory, servers included: {memory}. Load average {result['load_average']:.1f}."
    )
    return [shown, note]


def _tokens(case: Result) -> str:
    return f"{case['tokens']}+" if "turn" in case["what"] else str(case["tokens"])


def _seconds(side: str) -> Show:
    return lambda case: f"{case['seconds'][side]['p50']:.3f}"


def _ratio(side: str) -> Show:
    return lambda case: interval(case["ratio"][side])


def _same(case: Result) -> str:
    wrong = [_SHORT[side] for side, same in case["same_tokens"].items() if not same]
    return f"[bold red]not {', '.join(wrong)}[/bold red]" if wrong else "yes"


def plot(result: Result, folder: Path) -> None:
    """Raises ConfigError: matplotlib is missing, or the folder cannot be written."""
    width = 1.6 + 1.2 * len(result["cases"])
    draw({"peers.png": partial(_bars, result)}, folder, inches=(width, 4))


def _bars(result: Result, axes: Axes) -> None:
    """By case."""
    sides, cases = list(result["max_rss_bytes"]), result["cases"]
    width = 0.8 / len(sides)
    for number, side in enumerate(sides):
        places = [at + number * width for at in range(len(cases))]
        axes.bar(places, [c["seconds"][side]["p50"] for c in cases], width, label=_SHORT[side])
    names = [f"{_NAMES[c['what']]}\n{_tokens(c)}" for c in cases]
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(cases))], names, fontsize=8)
    axes.set_ylabel("seconds to the first token")
    axes.legend(frameon=False)
