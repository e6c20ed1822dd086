"""`quire bench pd`: turns of long conversations, on engines apart and on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.bench_options import PageSize, Seed
from quire.cli.devices import check_device
from quire.cli.extras import SERVE, needs
from quire.cli.output import AsJson, conclude, progress_bar, start_bar, unset
from quire.errors import ConfigError

EMBEDDED = "embedded"


def pd(
    shape: Annotated[
        str,
        typer.Option(
            metavar="SHAPE|embedded|DIR",
            help="Of a model with random weights: qwen3-8b, llama-3.1-8b, tiny; or a real model.",
        ),
    ] = "qwen3-8b",
    layers: Annotated[
        int | None,
        unset("Of the random model, if not all.", min=1),
    ] = None,
    keep: Annotated[
        Path | None,
        unset("Keep the random weights there, or use those that are there.", metavar="DIR"),
    ] = None,
    device: Annotated[str, typer.Option(help="Where all engines run: cuda or cpu.")] = "cuda",
    transport: Annotated[
        list[str] | None, typer.Option(help="How pages travel; repeat for several. [tcp, shm]")
    ] = None,
    added: Annotated[
        list[int] | None,
        typer.Option(min=1, help="New tokens of a later turn; repeat for several. [500, 2000]"),
    ] = None,
    later_turns: Annotated[int, typer.Option(min=1, help="Of each side, at least.")] = 200,
    sessions: Annotated[int, typer.Option(min=1, help="That grow together.")] = 6,
    shortest: Annotated[int, typer.Option(min=1, help="Tokens of a first prompt.")] = 8_000,
    longest: Annotated[int, typer.Option(min=1, help="Tokens of a last prompt.")] = 32_000,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Requests.")] = 4,
    page_size: PageSize = 64,
    decode_computes: Annotated[
        int, typer.Option(min=0, help="As of quire serve: tokens that decode computes itself.")
    ] = 1024,
    threads: Annotated[int, typer.Option(min=0, help="Of each engine, on a CPU.")] = 0,
    limit: Annotated[
        float | None,
        unset("Seconds of asking; then no other round begins."),
    ] = None,
    out: Annotated[
        Path | None,
        unset("Write what there is, as it comes.", metavar="FILE"),
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Later turns of long conversations: prefill and decode apart beside a unified engine.

    The decode engine with its cache and without, over each transport, all on one device.
    Exit code 1 when bytes came another way than they should, or a side without a cache had some.
    """
    needs("serve", SERVE)
    check_device(device)
    import tempfile

    from evidence.pd import report
    from evidence.pd import run as bench
    from evidence.pd.plan import Plan
    from quire.models import describe
    from quire.peer.kinds import TransportKind

    try:
        kinds = tuple(TransportKind(name) for name in transport or ("tcp", "shm"))
    except ValueError as error:
        raise ConfigError(f"--transport: {error}: use tcp or shm") from error
    if TransportKind.AUTO in kinds:
        raise ConfigError("--transport auto is no way of its own: use tcp or shm")
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        model = _model(shape, layers, keep or Path(folder) / "model", device)
        plan = Plan(
            model=model,
            device=device,
            added=tuple(added or (500, 2000)),
            transports=tuple(dict.fromkeys(kinds)),
            later_turns=later_turns,
            sessions=sessions,
            shortest=shortest,
            longest=longest,
            answer=answer,
            at_once=at_once,
            limit_s=limit,
            decode_computes=decode_computes,
            page_size=page_size,
            threads=threads,
            vocabulary=describe(model).vocab_size,
            seed=seed,
        )
        with progress_bar() as progress:
            result = bench.run(plan, progress, lambda found: _write(out, found))
    conclude(result, report.tables, as_json=as_json)


def _model(shape: str, layers: int | None, directory: Path, device: str) -> Path:
    """Its directory; a random one is made if it is not there."""
    import torch

    from evidence.random_weights import write_model
    from quire.bench.gpu.random_model import SHAPES
    from quire.models import resolve

    if shape not in SHAPES:
        if layers is not None:
            raise ConfigError(f"--layers is for random weights, and {shape!r} is none of them")
        with start_bar() as starting:
            return resolve(None if shape == EMBEDDED else shape, starting)
    if not directory.exists():
        with progress_bar() as progress:
            write_model(
                directory,
                shape,
                device=torch.device(device),
                layers=layers,
                progress=lambda done, of: progress("random weights", done, of),
            )
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
    return directory


def _write(out: Path | None, found: dict[str, Any]) -> None:
    """Whole, or not at all."""
    if out is not None:
        beside = out.with_name(out.name + ".part")
        beside.write_text(json.dumps(found, indent=1))
        beside.replace(out)
