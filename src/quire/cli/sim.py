"""`quire sim`: seeded runs of the real manager, or of real engines, over simulated workers, with
faults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from enum import Enum
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer

from quire.cli.output import (
    EXIT_FOUND,
    AsJson,
    complain,
    conclude,
    progress_bar,
    show_json,
    tell,
)
from quire.cli.swarm import swarm
from quire.sim import SimOptions, SimulationError, simulate
from quire.sim.options import CommonOptions
from quire.sim.pd.options import OverloadOptions, SimPdOptions

app = typer.Typer(
    help="The real thing over simulated workers, stores and lines, in virtual time, with faults.",
    no_args_is_help=True,
)

_SEEDED: dict[str, tuple[Any, Any]] = {
    "seed": (Annotated[int, typer.Option(help="Decides everything that is not given.")], 0),
    "as_json": (AsJson, False),
}
_OWN = _SEEDED | {
    "steps": (Annotated[int, typer.Option(min=1, help="Of the simulated loop.")], 20_000),
}
"""Options of both kinds of run, beside those of the simulations."""


def _options_of(
    kind: type[CommonOptions | OverloadOptions], own: dict[str, tuple[Any, Any]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that takes every field of `kind` as an option, and its own; those of `kind` that
    are not given it does not get."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints, options = get_type_hints(kind), dict(own)
        common = {field.name: field.metadata for field in fields(CommonOptions)}
        for field in fields(kind):
            about = common.get(field.name, field.metadata)
            info = typer.Option(
                help=about["about"], rich_help_panel=about["panel"], min=about["least"]
            )
            options[field.name] = (Annotated[hints[field.name] | None, info], None)

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            command(**{name: value for name, value in given.items() if value is not None})

        parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for name, (annotation, default) in options.items()
        ]
        with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {name: given[0] for name, given in options.items()}
        return with_options

    return decorate


@app.callback()
def _group() -> None:
    """The real thing over simulated workers, stores and lines, in virtual time, with faults."""


@app.command(epilog="Example: [bold]quire sim run --seed 7 --steps 20000 --ranks 2[/bold]")
@_options_of(SimOptions, _OWN)
def run(*, seed: int, steps: int, as_json: bool, **given: Any) -> None:
    """One run, checked at every step. The same seed and options repeat it exactly.

    A run that breaks a rule ends with exit code 1 and the command that repeats it.
    """
    _run(simulate, seed, steps, replace(SimOptions.from_seed(seed), **given), as_json=as_json)


@app.command(epilog="Example: [bold]quire sim pd --seed 7 --steps 20000 --kill-rate 0.01[/bold]")
@_options_of(SimPdOptions, _OWN)
def pd(*, seed: int, steps: int, as_json: bool, **given: Any) -> None:
    """One run of a cluster: real engines, simulated workers and lines, checked at every step.

    A run that breaks a rule ends with exit code 1 and the command that repeats it.
    """
    from quire.sim.pd.run import simulate_pd  # the engine, and with it torch

    _run(simulate_pd, seed, steps, replace(SimPdOptions.from_seed(seed), **given), as_json=as_json)


@app.command(epilog="Example: [bold]quire sim overload --servers 4 --sessions 400[/bold]")
@_options_of(OverloadOptions, _SEEDED)
def overload(*, seed: int, as_json: bool, **given: Any) -> None:
    """More than the lines between engines carry, for two minutes: goodput, waits, and the rest.

    Ends with exit code 1 if less than 80 % of the lines was of use, if somebody waited more than
    three times the longest fair wait, or if not all is answered. The default takes some minutes.
    """
    from quire.sim.pd.overload import overload as run_overload  # the engine, and with it torch

    options = OverloadOptions(**given)
    try:
        with progress_bar() as progress:
            report = run_overload(
                seed, options, progress=lambda _s, n: progress("answered", n, options.sessions)
            )
    except SimulationError as error:
        complain(str(error))
        raise typer.Exit(EXIT_FOUND) from error
    conclude(
        {"ok": report.holds, "seed": seed, **dict(report.rows())},
        lambda _found: [
            _table(f"seed {seed}: {options.times:g} × what the lines carry", report.rows())
        ],
        as_json=as_json,
    )


app.command(epilog="Example: [bold]quire sim swarm --minutes 10 --jobs 16[/bold]")(swarm)


def _run(
    simulate: Callable[..., Any],
    seed: int,
    steps: int,
    options: SimOptions | SimPdOptions,
    *,
    as_json: bool,
) -> None:
    try:
        with progress_bar() as progress:
            report = simulate(
                seed, steps, options, progress=lambda done: progress("simulating", done, steps)
            )
    except SimulationError as error:
        if as_json:
            again = options.command(seed, steps)
            show_json({"ok": False, "seed": seed, "error": str(error), "repeat": again})
        else:
            complain(str(error))
        raise typer.Exit(EXIT_FOUND) from error
    tell(
        _plain({"ok": True, **asdict(report)}),
        _table(f"seed {report.seed}: no rule was broken", report.rows()),
        as_json=as_json,
    )


def _table(title: str, rows: list[tuple[str, str]]) -> Any:
    from rich.table import Table

    table = Table("", "", title=title, show_header=False)
    for what, figure in rows:
        table.add_row(what, figure)
    return table


def _plain(value: Any) -> Any:
    """Enums as their values, for JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value
