"""Benchmarks behind single claims of the documents: commands in a checkout, where they are kept in
benchmarks/, and elsewhere a sentence that says so."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

import quire
from quire.errors import ConfigError

FOLDER = Path(quire.__file__).parents[2] / "benchmarks"
NAMES = ("disagg", "hybrid", "overhead", "pd", "schemas")


def add_to(app: typer.Typer, folder: Path = FOLDER) -> None:
    if not (folder / "evidence").is_dir():
        for name in NAMES:
            app.command(name, hidden=True, context_settings=_ANYTHING)(_elsewhere)
        return
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    from evidence.commands import COMMANDS

    for name, (command, example) in COMMANDS.items():
        app.command(epilog=f"Example: [bold]quire bench {name} {example}[/bold]")(command)


_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _elsewhere(context: typer.Context) -> None:
    raise ConfigError(
        f"`quire bench {context.info_name}` checks a claim of the documents and is not part of the "
        "package: run it in a checkout of Quire's repository"
    )
