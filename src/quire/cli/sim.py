"""`quire sim`: seeded runs of the real manager over simulated workers, with faults."""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated, Any

import typer

from quire.cli.output import EXIT_FOUND, AsJson, complain, progress_bar, show, show_json
from quire.config import PrefetchPolicy, WritePolicy
from quire.eviction import EvictionKind
from quire.sim import ComponentMix, SimOptions, SimReport, SimulationError, UnitMix, simulate

app = typer.Typer(
    help="Run the real manager over simulated workers and stores, in virtual time, with faults.",
    no_args_is_help=True,
)

CACHE = "The cache (by default all of it follows from the seed)"
HYBRID = "Windows and recurrent state"
TROUBLE = "The trouble it is put through"


@app.callback()
def _group() -> None:
    """Run the real manager over simulated workers and stores, in virtual time, with faults."""


@app.command(epilog="Example: [bold]quire sim run --seed 7 --steps 20000 --ranks 2[/bold]")
def run(
    seed: Annotated[int, typer.Option(help="Decides everything that is not given.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the scheduler loop.")] = 20_000,
    as_json: AsJson = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel ranks.", rich_help_panel=CACHE)
    ] = None,
    write_policy: Annotated[
        WritePolicy | None, typer.Option(help="When pages go to the host.", rich_help_panel=CACHE)
    ] = None,
    prefetch_policy: Annotated[
        PrefetchPolicy | None,
        typer.Option(help="How long requests wait for the store.", rich_help_panel=CACHE),
    ] = None,
    eviction: Annotated[
        EvictionKind | None, typer.Option(help="What goes first.", rich_help_panel=CACHE)
    ] = None,
    units: Annotated[
        UnitMix | None,
        typer.Option(help="Token units, pair units, or namespaces of both.", rich_help_panel=CACHE),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(help="Units per page.", rich_help_panel=CACHE)
    ] = None,
    device_pages: Annotated[
        int | None, typer.Option(help="Size of the device tier.", rich_help_panel=CACHE)
    ] = None,
    host_pages: Annotated[
        int | None, typer.Option(help="Size of the host tier.", rich_help_panel=CACHE)
    ] = None,
    mix: Annotated[
        ComponentMix | None,
        typer.Option(help="What the model keeps beside full attention.", rich_help_panel=HYBRID),
    ] = None,
    window_pages: Annotated[
        int | None, typer.Option(help="Pages of a sliding window.", rich_help_panel=HYBRID)
    ] = None,
    device_windows: Annotated[
        int | None, typer.Option(help="Window pages on the device.", rich_help_panel=HYBRID)
    ] = None,
    host_windows: Annotated[
        int | None, typer.Option(help="Window pages on the host.", rich_help_panel=HYBRID)
    ] = None,
    device_slots: Annotated[
        int | None, typer.Option(help="Recurrent states on the device.", rich_help_panel=HYBRID)
    ] = None,
    host_slots: Annotated[
        int | None, typer.Option(help="Recurrent states on the host.", rich_help_panel=HYBRID)
    ] = None,
    snapshot_every: Annotated[
        int | None,
        typer.Option(
            help="Pages between two snapshots; 0: only where needed.", rich_help_panel=HYBRID
        ),
    ] = None,
    snapshots_per_path: Annotated[
        int | None, typer.Option(help="Snapshots kept along one prefix.", rich_help_panel=HYBRID)
    ] = None,
    threshold_pages: Annotated[
        int | None, typer.Option(min=1, help="Shorter hits are not fetched.", rich_help_panel=CACHE)
    ] = None,
    events: Annotated[
        bool | None,
        typer.Option(help="Keep events and compare them with the tree.", rich_help_panel=CACHE),
    ] = None,
    cost_model: Annotated[
        bool | None, typer.Option(help="Fetch only if it beats recomputing.", rich_help_panel=CACHE)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests alive at once.", rich_help_panel=TROUBLE)
    ] = None,
    fault_rate: Annotated[
        float | None,
        typer.Option(help="Share of backend calls that go wrong.", rich_help_panel=TROUBLE),
    ] = None,
    slow_share: Annotated[
        float | None,
        typer.Option(help="Share that takes a hundred times longer.", rich_help_panel=TROUBLE),
    ] = None,
    stuck_share: Annotated[
        float | None,
        typer.Option(help="Share that outlives every deadline.", rich_help_panel=TROUBLE),
    ] = None,
    abort_rate: Annotated[
        float | None, typer.Option(help="Aborts per step.", rich_help_panel=TROUBLE)
    ] = None,
    admin_rate: Annotated[
        float | None,
        typer.Option(help="Changes of the store and flushes per step.", rich_help_panel=TROUBLE),
    ] = None,
    lose_rank: Annotated[
        bool | None,
        typer.Option(help="One rank dies after two thirds of the steps.", rich_help_panel=TROUBLE),
    ] = None,
) -> None:
    """One run, checked at every step. The same seed and options repeat it exactly.

    A run that breaks a rule ends with exit code 1 and the command that repeats it.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    overrides = {name: value for name, value in given.items() if name not in _OWN}
    options = replace(SimOptions.from_seed(seed), **overrides)
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
    if as_json:
        show_json(_plain({"ok": True, **asdict(report)}))
    else:
        show(_table(report))


_OWN = ("seed", "steps", "as_json")


def _table(report: SimReport) -> Any:
    from rich.table import Table

    table = Table("", "", title=f"seed {report.seed}: no rule was broken", show_header=False)
    for what, figure in report.rows():
        table.add_row(what, figure)
    return table


def _plain(value: Any) -> Any:
    """Enums as their values, for JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value
