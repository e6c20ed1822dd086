"""`quire bench hybrid`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.bench_options import PageSize, Seed
from quire.cli.extras import SERVE, needs
from quire.cli.output import AsJson, conclude, progress_bar, unset


def hybrid(
    model: Annotated[
        str | None,
        unset(
            "By default one with recurrent layers, of random weights, is made.", metavar="DIR|FILE"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 4000,
    repeats: Annotated[
        int, typer.Option(min=0, help="Prompts tried in every tier; 0 leaves that part out.")
    ] = 5,
    rounds: Annotated[
        int,
        typer.Option(
            min=0, help="Pairs of requests with and without snapshots; 0 leaves them out."
        ),
    ] = 12,
    page_size: PageSize = 16,
    threads: Annotated[int, typer.Option(min=1, help="Of the model.")] = 2,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Models with recurrent layers or windows: what a hit saves, and what snapshots cost.

    On the CPU, in this process. Exit code 1 when an answer differs from the computed one, or was
    not found in the tier that it should have been.
    """
    needs("serve", SERVE)
    from evidence.hybrid import report as hybrid_report
    from evidence.hybrid import run as bench
    from quire.models import resolve

    plan = bench.Plan(
        model=None if model is None else resolve(model),
        tokens=tokens,
        repeats=repeats,
        rounds=rounds,
        page_size=page_size,
        threads=threads,
        seed=seed,
    )
    with progress_bar() as progress:
        result = bench.run(plan, progress)
    conclude(result, hybrid_report.tables, as_json=as_json)
