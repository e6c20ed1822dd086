"""How commands talk: tables or one JSON object on standard output, everything else on stderr.

Knows consoles and progress bars, no command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from quire.progress import Progress, Share

EXIT_FOUND = 1
"""The command worked and found something wrong."""
EXIT_ERROR = 2
"""The command was asked wrongly, or could not do its work."""


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")
]


def unset(text: str, *flags: str, **more: Any) -> Any:
    """An option that has no value unless it is given, and what it is for."""
    return typer.Option(*flags, help=text, show_default=False, **more)


def show(*items: RenderableType) -> None:
    console = Console(highlight=False)
    for item in items:
        console.print(item)


def show_json(result: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def tell(result: Mapping[str, Any], *items: RenderableType, as_json: bool) -> None:
    """A command's answer, in one of its two forms."""
    if as_json:
        show_json(result)
    else:
        show(*items)


def conclude(
    result: Mapping[str, Any],
    tables: Callable[[Any], Iterable[RenderableType]],
    *,
    as_json: bool,
) -> None:
    """Show what a benchmark found; its "ok" decides the exit code."""
    tell(result, *(() if as_json else tables(result)), as_json=as_json)
    if not result["ok"]:
        raise typer.Exit(EXIT_FOUND)


def complain(sentence: str) -> None:
    """To the person, in full, whatever the width of the terminal."""
    sys.stderr.write(f"quire: {sentence}\n")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """One bar per piece of work, on standard error, and only if a person is looking at it."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    ]
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield update


@contextmanager
def start_bar() -> Iterator[Share]:
    """For what takes a while before anything works: called with (what, share done). A bar for a
    person, a line per step otherwise, as it goes to a log then."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    doing = TextColumn("{task.description}", markup=False)
    columns = [doing, BarColumn(), TaskProgressColumn()]
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=1.0)
        before = ""

        def update(what: str, share: float) -> None:
            nonlocal before
            if what != before and not console.is_terminal:
                complain(what)
            before = what
            bars.update(task, description=what, completed=share)

        yield update
