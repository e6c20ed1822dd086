"""Options that several benchmarks have, each said once. Knows no benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EmbeddedModel = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|FILE",
        help="By default SmolLM2-135M-Instruct, which comes with Quire.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
PageSize = Annotated[int, typer.Option(min=1, help="Tokens per page.")]
Seed = Annotated[int, typer.Option(help="Decides every prompt.")]
TierRepeats = Annotated[
    int, typer.Option(min=0, help="Prompts tried in every tier; 0 leaves that part out.")
]
Plots = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Draw the result there, as PNG.", show_default=False),
]
