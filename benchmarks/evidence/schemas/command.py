"""`quire bench schemas`: answers that follow schemas, checked and measured."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quire.cli.bench_options import Device, EmbeddedModel
from quire.cli.extras import SERVE, needs
from quire.cli.output import AsJson, conclude, start_bar

_EVERY = 25


def schemas(
    count: Annotated[int, typer.Option(min=1, help="Random schemas.")] = 500,
    seed: Annotated[int, typer.Option(help="Of the schemas and the draws.")] = 20_261,
    depth: Annotated[int, typer.Option(min=0, max=4, help="Of a schema, at most.")] = 2,
    at_once: Annotated[int, typer.Option(min=1, help="Answers at a time.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of the costs; medians are shown.")] = 3,
    model: EmbeddedModel = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Answers held to random schemas: are all valid, and what does a token cost?

    At temperature 1; beside plain decoding, and a step beside schemas made to be hard.
    Exit code 1 when an answer is not valid.
    """
    needs("serve", SERVE)
    from evidence.schemas import costs, report, run, valid
    from quire.models import resolve

    with start_bar() as starting:
        directory = resolve(model, starting)
    plan = run.Plan(
        directory,
        device,
        valid.Asked(count=count, seed=seed, depth=depth, together=at_once),
        costs.Plan(rounds=rounds),
    )
    conclude(run.run(plan, _tell), report.tables, as_json=as_json)


def _tell(what: str, done: int, total: int) -> None:
    if done % _EVERY == 0 or done == total:
        sys.stderr.write(f"{what}: {done} of {total}\n")
