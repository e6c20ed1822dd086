"""What `quire bench peers` shows: a table, and a plot of the same."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from quire.bench.peers.run import ALONE, LMCACHE, QUIRE
from quire.bench.report import Result, new_table
from quire.sizes import format_bytes

_NAMES = {
    "new": "never seen",
    "again": "host",
    "batch": "several, never seen",
    "first turn": "session, first turn",
    "turn": "session, later turn",
    "restart": "after a restart",
}
_SHORT = {ALONE: "alone", QUIRE: "Quire", LMCACHE: "LMCache"}


def table(result: Result) -> list[RenderableType]:
    sides = list(result["max_rss_bytes"])
    others = [side for side in sides if side != QUIRE]
    shown = new_table("vLLM alone and with a cache behind it, seconds to an answer of one token")
    columns = ["prompt", "tokens", *(_SHORT[side] for side in sides)]
    columns += [f"Quire / {_SHORT[side]}" for side in others] + ["reused", "same"]
    for name in columns:
        shown.add_column(name, justify="left" if name == "prompt" else "right")
    for case in result["cases"]:
        reused = [str(case["reused"][side]) for side in sides if side != ALONE]
        wrong = [_SHORT[side] for side, same in case["same_tokens"].items() if not same]
        shown.add_row(
            _NAMES[case["what"]],
            _tokens(case),
            *(f"{case['seconds'][side]['p50']:.3f}" for side in sides),
            *(_ratio(case["ratio"][side]) for side in others),
            " ".join(reused),
            f"[bold red]not {', '.join(wrong)}[/bold red]" if wrong else "yes",
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


def _ratio(found: Result) -> str:
    return f"{found['ratio']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def plot(result: Result, folder: Path) -> Path:
    """Bars by case. Raises OSError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    sides, cases = list(result["max_rss_bytes"]), result["cases"]
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.2 * len(cases), 4))
    width = 0.8 / len(sides)
    for number, side in enumerate(sides):
        places = [at + number * width for at in range(len(cases))]
        axes.bar(places, [c["seconds"][side]["p50"] for c in cases], width, label=_SHORT[side])
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(cases))])
    axes.set_xticklabels([f"{_NAMES[c['what']]}\n{_tokens(c)}" for c in cases], fontsize=8)
    axes.set_ylabel("seconds to the first token")
    axes.legend()
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "peers.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
