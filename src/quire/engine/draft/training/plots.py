"""Pictures of a training, from its report: PNG files.

    training.png      loss, and how often head and target agree, by step of the unroll
    acceptance.png    held-out text: acceptance length over the length of the chain, by source

matplotlib is loaded only here, and without a display.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#1b7f5c", "#56b4a0", "#7a9cc6", "#c8553d", "#d9a441", "#8a6fb0", "#22282e", "#b7a99a")

_LABEL_CHARS = 18
"""Of a file's name."""


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """Raises ConfigError: matplotlib is missing, or the folder cannot be written."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plots draws with matplotlib, which is not installed: pip install 'quire[bench]'"
        ) from error
    paths = []
    for name, draw in (("training.png", _training), ("acceptance.png", _acceptance)):
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draw(report).savefig(path, dpi=150)
        except OSError as error:
            raise ConfigError(
                f"cannot write {str(path)!r} ({error.strerror}): give --plots another directory"
            ) from error
        paths.append(path)
    return paths


def _canvas(columns: int) -> tuple[Figure, list[Any]]:
    """A figure of its own, apart from pyplot's global state: Agg draws it when it is saved."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * columns, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, number + 1) for number in range(columns)]
    for one in axes:
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
        one.grid(axis="y", alpha=0.25)
    return figure, axes


def _training(report: dict[str, Any]) -> Figure:
    figure, (losses, right) = _canvas(2)
    history = report["history"]
    steps = [entry["step"] for entry in history]
    for axes, what in ((losses, "loss"), (right, "right")):
        for number in range(len(history[0][what]) if history else 0):
            values = [entry[what][number] for entry in history]
            label = f"token {number + 1} of a draft"
            axes.plot(steps, values, color=_COLOURS[number % len(_COLOURS)], label=label)
        axes.set_xlabel("step")
    losses.set_ylabel("cross-entropy against the model")
    right.set_ylabel("share where head and model agree")
    right.legend(frameon=False)
    return figure


def _acceptance(report: dict[str, Any]) -> Figure:
    figure, (axes,) = _canvas(1)
    sources = report["accepted"].items()
    for number, (source, result) in enumerate(sources):
        lengths = result["length"]
        axes.plot(
            range(1, len(lengths) + 1),
            lengths,
            marker="o",
            linewidth=3 if source == "all" else 1.5,
            color=_COLOURS[number % len(_COLOURS)],
            label=f"{source[:_LABEL_CHARS]} ({result['tokens']:,} tokens)",
        )
    axes.set_xticks(range(1, 1 + len(report["accepted"]["all"]["length"])))
    axes.set_ylim(bottom=1.0)
    axes.set_xlabel("tokens proposed at a time")
    axes.set_ylabel("tokens per step of the model")
    axes.set_title("What is accepted of greedy drafts on held-out text")
    axes.legend(frameon=False)
    return figure
