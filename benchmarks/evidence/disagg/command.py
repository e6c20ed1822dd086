"""`quire bench disagg`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.bench_options import EmbeddedModel, PageSize, Seed
from quire.cli.extras import SERVE, needs
from quire.cli.output import AsJson, conclude, progress_bar, start_bar
from quire.errors import ConfigError


def disagg(
    model: EmbeddedModel = None,
    sessions: Annotated[
        int, typer.Option(min=0, help="That grow turn by turn; 0 leaves that part out.")
    ] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Of each session.")] = 3,
    tokens: Annotated[int, typer.Option(min=64, help="Of a first prompt, in the mean.")] = 240,
    stall: Annotated[float, typer.Option(min=0.1, help="Seconds that the store stalls.")] = 5.0,
    stall_rounds: Annotated[
        int, typer.Option(min=0, help="With the store stalled and not; 0 leaves that part out.")
    ] = 3,
    restore_rounds: Annotated[
        int, typer.Option(min=0, help="Of 64 sessions restored at once; 0 leaves that part out.")
    ] = 5,
    page_size: PageSize = 16,
    threads: Annotated[int, typer.Option(min=1, help="Of each engine's model.")] = 1,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Prefill and decode apart: what the decode-side cache saves; a store that stalls; restores.

    On the CPU, all engines on this machine. Exit code 1 when an answer differs, when bytes do not
    fall by the share of pages reused, or when a step waited for the store.
    """
    needs("serve", SERVE)
    from evidence.disagg import report as disagg_report
    from evidence.disagg import run as bench
    from quire.models import resolve

    if not (sessions or stall_rounds or restore_rounds):
        raise ConfigError("nothing would be measured: raise --sessions or one of the --…-rounds")
    with start_bar() as starting:
        directory = resolve(model, starting)
    plan = bench.Plan(
        model=directory,
        sessions=sessions,
        turns=turns,
        tokens=tokens,
        stall_s=stall,
        stall_rounds=stall_rounds,
        restore_rounds=restore_rounds,
        page_size=page_size,
        threads=threads,
        seed=seed,
    )
    with progress_bar() as progress:
        result = bench.run(plan, progress)
    conclude(result, disagg_report.tables, as_json=as_json)
