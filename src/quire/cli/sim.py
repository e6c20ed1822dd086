"""`quire sim`: seeded runs of the real manager, or of real engines, over simulated workers, with
faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated, Any, Protocol

import typer

from quire.cli.output import EXIT_FOUND, AsJson, complain, progress_bar, show, show_json
from quire.cli.swarm import swarm
from quire.config import PrefetchPolicy, WritePolicy
from quire.eviction import EvictionKind
from quire.sim import ComponentMix, SimOptions, SimulationError, UnitMix, simulate
from quire.sim.pd.options import SimPdOptions, Topology

app = typer.Typer(
    help="The real thing over simulated workers, stores and lines, in virtual time, with faults.",
    no_args_is_help=True,
)

CACHE = "The cache (by default all of it follows from the seed)"
CLUSTER = "The engines (by default all of it follows from the seed)"
HYBRID = "Windows and recurrent state"
TROUBLE = "The trouble it is put through"


# Options of both kinds of run.
WritePolicyGiven = Annotated[
    WritePolicy | None, typer.Option(help="When pages go to the host.", rich_help_panel=CACHE)
]
PrefetchPolicyGiven = Annotated[
    PrefetchPolicy | None,
    typer.Option(help="How long requests wait for the store.", rich_help_panel=CACHE),
]
DevicePages = Annotated[
    int | None, typer.Option(help="Size of the device tier.", rich_help_panel=CACHE)
]
HostPages = Annotated[
    int | None, typer.Option(help="Size of the host tier.", rich_help_panel=CACHE)
]
Mix = Annotated[
    ComponentMix | None,
    typer.Option(help="What the model keeps beside full attention.", rich_help_panel=HYBRID),
]
WindowPages = Annotated[
    int | None, typer.Option(help="Pages of a sliding window.", rich_help_panel=HYBRID)
]
DeviceWindows = Annotated[
    int | None, typer.Option(help="Window pages on the device.", rich_help_panel=HYBRID)
]
HostWindows = Annotated[
    int | None, typer.Option(help="Window pages on the host.", rich_help_panel=HYBRID)
]
DeviceSlots = Annotated[
    int | None, typer.Option(help="Recurrent states on the device.", rich_help_panel=HYBRID)
]
HostSlots = Annotated[
    int | None, typer.Option(help="Recurrent states on the host.", rich_help_panel=HYBRID)
]
ThresholdPages = Annotated[
    int | None, typer.Option(min=1, help="Shorter hits are not fetched.", rich_help_panel=CACHE)
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Requests alive at once.", rich_help_panel=TROUBLE)
]
FaultRate = Annotated[
    float | None,
    typer.Option(help="Share of backend calls that go wrong.", rich_help_panel=TROUBLE),
]
SlowShare = Annotated[
    float | None,
    typer.Option(help="Share that takes a hundred times longer.", rich_help_panel=TROUBLE),
]
StuckShare = Annotated[
    float | None,
    typer.Option(help="Share that outlives every deadline.", rich_help_panel=TROUBLE),
]
StorePages = Annotated[
    int | None, typer.Option(help="Room in the store; 0: endless.", rich_help_panel=TROUBLE)
]
LanePagesS = Annotated[
    float | None,
    typer.Option(help="Pages a second of each rank's lanes; 0: any.", rich_help_panel=TROUBLE),
]
Arrivals = Annotated[
    float | None,
    typer.Option(help="Per step, whoever else waits; 0: by concurrency.", rich_help_panel=TROUBLE),
]
Strict = Annotated[
    bool | None, typer.Option(help="Watch every call of the manager.", rich_help_panel=TROUBLE)
]
AbortRate = Annotated[float | None, typer.Option(help="Aborts per step.", rich_help_panel=TROUBLE)]


@app.callback()
def _group() -> None:
    """The real thing over simulated workers, stores and lines, in virtual time, with faults."""


@app.command(epilog="Example: [bold]quire sim run --seed 7 --steps 20000 --ranks 2[/bold]")
def run(
    seed: Annotated[int, typer.Option(help="Decides everything that is not given.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the scheduler loop.")] = 20_000,
    as_json: AsJson = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel ranks.", rich_help_panel=CACHE)
    ] = None,
    write_policy: WritePolicyGiven = None,
    prefetch_policy: PrefetchPolicyGiven = None,
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
    device_pages: DevicePages = None,
    host_pages: HostPages = None,
    mix: Mix = None,
    window_pages: WindowPages = None,
    device_windows: DeviceWindows = None,
    host_windows: HostWindows = None,
    device_slots: DeviceSlots = None,
    host_slots: HostSlots = None,
    snapshot_every: Annotated[
        int | None,
        typer.Option(
            help="Pages between two snapshots; 0: only where needed.", rich_help_panel=HYBRID
        ),
    ] = None,
    snapshots_per_path: Annotated[
        int | None, typer.Option(help="Snapshots kept along one prefix.", rich_help_panel=HYBRID)
    ] = None,
    threshold_pages: ThresholdPages = None,
    events: Annotated[
        bool | None,
        typer.Option(help="Keep events and compare them with the tree.", rich_help_panel=CACHE),
    ] = None,
    cost_model: Annotated[
        bool | None, typer.Option(help="Fetch only if it beats recomputing.", rich_help_panel=CACHE)
    ] = None,
    concurrency: Concurrency = None,
    fault_rate: FaultRate = None,
    slow_share: SlowShare = None,
    stuck_share: StuckShare = None,
    abort_rate: AbortRate = None,
    admin_rate: Annotated[
        float | None,
        typer.Option(help="Changes of the store and flushes per step.", rich_help_panel=TROUBLE),
    ] = None,
    lose_rank: Annotated[
        bool | None,
        typer.Option(help="One rank dies after two thirds of the steps.", rich_help_panel=TROUBLE),
    ] = None,
    strict: Strict = None,
    store_pages: StorePages = None,
    lane_pages_s: LanePagesS = None,
    arrivals: Arrivals = None,
) -> None:
    """One run, checked at every step. The same seed and options repeat it exactly.

    A run that breaks a rule ends with exit code 1 and the command that repeats it.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    overrides = {name: value for name, value in given.items() if name not in _OWN}
    options = replace(SimOptions.from_seed(seed), **overrides)
    _run(
        lambda progress: simulate(seed, steps, options, progress=progress),
        seed=seed,
        steps=steps,
        again=options.command(seed, steps),
        as_json=as_json,
    )


@app.command(epilog="Example: [bold]quire sim pd --seed 7 --steps 20000 --kill-rate 0.01[/bold]")
def pd(
    seed: Annotated[int, typer.Option(help="Decides everything that is not given.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Turns of engines.")] = 20_000,
    as_json: AsJson = False,
    topology: Annotated[
        Topology | None,
        typer.Option(
            help="Prefill and decode engines, or unified ones that share pages.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    prefills: Annotated[
        int | None, typer.Option(min=0, help="Prefill engines.", rich_help_panel=CLUSTER)
    ] = None,
    decodes: Annotated[
        int | None,
        typer.Option(min=1, help="Decode (or unified) engines.", rich_help_panel=CLUSTER),
    ] = None,
    prefill_ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of each prefill.", rich_help_panel=CLUSTER)
    ] = None,
    decode_ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks of each other.", rich_help_panel=CLUSTER)
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(help="Without progress, until a peer is given up.", rich_help_panel=CLUSTER),
    ] = None,
    restore: Annotated[
        bool | None,
        typer.Option(help="Decodes use their own host and the store.", rich_help_panel=CLUSTER),
    ] = None,
    write_policy: WritePolicyGiven = None,
    prefetch_policy: PrefetchPolicyGiven = None,
    page_size: Annotated[
        int | None, typer.Option(help="Tokens per page.", rich_help_panel=CACHE)
    ] = None,
    device_pages: DevicePages = None,
    host_pages: HostPages = None,
    threshold_pages: ThresholdPages = None,
    chunk_pages: Annotated[
        int | None, typer.Option(min=1, help="Computed in one step.", rich_help_panel=CACHE)
    ] = None,
    mix: Mix = None,
    window_pages: WindowPages = None,
    device_windows: DeviceWindows = None,
    host_windows: HostWindows = None,
    device_slots: DeviceSlots = None,
    host_slots: HostSlots = None,
    concurrency: Concurrency = None,
    fault_rate: FaultRate = None,
    slow_share: SlowShare = None,
    stuck_share: StuckShare = None,
    abort_rate: AbortRate = None,
    kill_rate: Annotated[
        float | None, typer.Option(help="Deaths of engines per step.", rich_help_panel=TROUBLE)
    ] = None,
    cut_rate: Annotated[
        float | None, typer.Option(help="Lines cut per step.", rich_help_panel=TROUBLE)
    ] = None,
    stall_rate: Annotated[
        float | None, typer.Option(help="Lines stalled per step.", rich_help_panel=TROUBLE)
    ] = None,
    leap_rate: Annotated[
        float | None, typer.Option(help="Standstills of all per step.", rich_help_panel=TROUBLE)
    ] = None,
    forget_rate: Annotated[
        float | None, typer.Option(help="Losses in the store per step.", rich_help_panel=TROUBLE)
    ] = None,
    evict_rate: Annotated[
        float | None, typer.Option(help="Flushes of a tier per step.", rich_help_panel=TROUBLE)
    ] = None,
    duplicated: Annotated[
        float | None, typer.Option(help="Share of messages sent twice.", rich_help_panel=TROUBLE)
    ] = None,
    reordered: Annotated[
        float | None, typer.Option(help="Share that may overtake.", rich_help_panel=TROUBLE)
    ] = None,
    delayed: Annotated[
        float | None, typer.Option(help="Share that comes late.", rich_help_panel=TROUBLE)
    ] = None,
    strict: Strict = None,
    store_pages: StorePages = None,
    lane_pages_s: LanePagesS = None,
    link_pages_s: Annotated[
        float | None,
        typer.Option(help="Pages a second of each engine's line; 0: any.", rich_help_panel=TROUBLE),
    ] = None,
    arrivals: Arrivals = None,
) -> None:
    """One run of a cluster: real engines, simulated workers and lines, checked at every step.

    A run that breaks a rule ends with exit code 1 and the command that repeats it.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    overrides = {name: value for name, value in given.items() if name not in _OWN}
    options = replace(SimPdOptions.from_seed(seed), **overrides)
    from quire.sim.pd.run import simulate_pd

    _run(
        lambda progress: simulate_pd(seed, steps, options, progress=progress),
        seed=seed,
        steps=steps,
        again=options.command(seed, steps),
        as_json=as_json,
    )


app.command(epilog="Example: [bold]quire sim swarm --minutes 10 --jobs 16[/bold]")(swarm)

_OWN = ("seed", "steps", "as_json")


class _Report(Protocol):
    @property
    def seed(self) -> int: ...

    def rows(self) -> list[tuple[str, str]]: ...


def _run(
    simulation: Callable[[Callable[[int], None]], _Report],
    *,
    seed: int,
    steps: int,
    again: str,
    as_json: bool,
) -> None:
    try:
        with progress_bar() as progress:
            report = simulation(lambda done: progress("simulating", done, steps))
    except SimulationError as error:
        if as_json:
            show_json({"ok": False, "seed": seed, "error": str(error), "repeat": again})
        else:
            complain(str(error))
        raise typer.Exit(EXIT_FOUND) from error
    if as_json:
        show_json(_plain({"ok": True, **_as_dict(report)}))
    else:
        show(_table(report))


def _as_dict(report: Any) -> dict[str, Any]:
    return asdict(report)


def _table(report: _Report) -> Any:
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
