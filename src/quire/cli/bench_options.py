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
TierRepeats = Annotated[
    int, typer.Option(min=0, help="Prompts tried in every tier; 0 leaves that part out.")
]
Plots = Annotated[
    Path | None,
    unset("Draw the result there, as PNG.", metavar="DIR"),
]
