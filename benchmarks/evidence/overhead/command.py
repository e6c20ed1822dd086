"""`quire bench overhead`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.bench_options import (
    DeviceMemory,
    EmbeddedModel,
    HostMemory,
    ModelDevice,
    Seed,
    StoreFolder,
)
from quire.cli.bench_serve import served_tiers
from quire.cli.extras import CLIENT, SERVE, needs
from quire.cli.output import AsJson, conclude, progress_bar


def overhead(
    model: EmbeddedModel = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Pairs of requests with and without host and store.")
    ] = 20,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="About so many in each.")] = 1000,
    output_tokens: Annotated[int, typer.Option(min=2, help="Generated after them.")] = 32,
    device: ModelDevice = "auto",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    directory: StoreFolder = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """What host and store cost when nothing is reused: two servers asked in turns.

    Starts them and stops them. Exit code 1 when their answers differ.
    """
    needs("serve,bench", SERVE + CLIENT)
    from evidence.overhead import report as overhead_report
    from evidence.overhead import run as bench

    tiers = served_tiers(model, device, device_memory, host_memory, directory)
    with progress_bar() as progress:
        result = bench.run(
            tiers,
            rounds=rounds,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            seed=seed,
            progress=progress,
        )
    conclude(result, overhead_report.tables, as_json=as_json)
