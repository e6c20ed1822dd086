"""`quire config`: what every option comes to and what set it. Starts nothing."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.markup import escape

from quire.cli import flags
from quire.cli.output import AsJson, complain, show, show_json
from quire.models import conversion
from quire.settings import OPTIONS, Loaded, Settings, check, effective, probe
from quire.settings.reference import markdown


@flags.taking()
def config(
    given: flags.Given,
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the reference of all options as Markdown.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show every option of the server: its value, and what set it.

    Takes the flags of `quire serve`, to try them out.
    """
    if reference:
        sys.stdout.write(markdown() + "\n")
        return
    loaded = given.loaded()
    machine = probe()
    settings = effective(loaded.settings, machine)
    warnings = check(loaded, settings, machine)
    if as_json:
        show_json(_as_dict(loaded, settings, warnings))
        return
    show(_table(loaded, settings))
    directory = conversion(settings.model)
    if directory is not None:
        state = "is converted in" if directory.is_dir() else "will be converted into"
        print(f"The model {state} {directory}")
    for warning in warnings:
        complain(warning)


def _as_dict(loaded: Loaded, settings: Settings, warnings: list[str]) -> dict[str, Any]:
    options = {}
    for name, option in OPTIONS.items():
        value = getattr(settings, name)
        shown = option.show(value) if option.is_secret else option.kind.plain(value)
        origin = loaded.origins[name]
        options[name] = {"value": shown, "source": origin.source.value, "where": origin.where}
    directory = conversion(settings.model)
    return {
        "options": options,
        "warnings": warnings,
        "model_directory": None if directory is None else str(directory),
    }


def _table(loaded: Loaded, settings: Settings) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("option", "value", "set by"):
        table.add_column(column, overflow="fold")
    for name, option in OPTIONS.items():
        origin, value = loaded.origins[name], getattr(settings, name)
        where = escape(origin.where)
        automatic = origin.where == "default" and option.auto and value is not None
        table.add_row(
            name,
            escape(option.show(value)),
            f"{where} (auto)" if automatic else where,
            style=None if origin.is_given else "dim",
        )
    return table
