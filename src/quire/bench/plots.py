"""How every benchmark draws: a canvas, a caption, PNG files. Knows no result.

matplotlib is loaded only here, and without a display.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = Callable[["Axes"], None]


def draw(
    pictures: Mapping[str, Picture],
    folder: Path,
    caption: str = "",
    *,
    inches: tuple[float, float] = (8, 5),
) -> list[Path]:
    """By the names of their files. Raises ConfigError: matplotlib is missing, or the folder cannot
    be written."""
    paths = []
    for name, picture in pictures.items():
        figure, axes = _new_canvas(inches)
        picture(axes)
        figure.supxlabel(caption, fontsize=8, color="#6b7278")
        paths.append(_save(figure, folder / name))
    return paths


def _new_canvas(inches: tuple[float, float]) -> tuple[Figure, Axes]:
    """A figure of its own, apart from pyplot's global state: Agg draws it when it is saved."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--plots draws with matplotlib, which is not installed: pip install 'quire[bench]'"
        ) from error
    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r} ({error.strerror}): give --plots another directory"
        ) from error
    return path
