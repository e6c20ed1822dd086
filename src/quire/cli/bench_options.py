"""Options that several benchmarks have, each said once. Knows no benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.output import unset

EmbeddedModel = Annotated[
    str | None,
    unset("By default SmolLM2-135M-Instruct, which comes with Quire.", metavar="DIR|FILE"),
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens per page.")]
Seed = Annotated[int, typer.Option(help="Decides every prompt.")]
Plots = Annotated[
    Path | None,
    unset("Draw the result there, as PNG.", metavar="DIR"),
]
ModelDevice = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="For the model.")]
DeviceMemory = Annotated[str | None, unset("Of L1 of each server.", metavar="SIZE")]
HostMemory = Annotated[str | None, unset("Of L2.", metavar="SIZE")]
StoreFolder = Annotated[
    Path | None,
    unset("Where to put the store for the time; by default the temporary directory."),
]
