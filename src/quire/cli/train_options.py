"""Options of `quire train-eagle`, by what they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.output import unset

EMBEDDED = "embedded"
_DATA = "What it learns from"
_HEAD = "The head"
_COURSE = "How it learns"

TaughtModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"Directory or .gguf file; '{EMBEDDED}' is the one that comes with Quire.",
    ),
]
TextFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="TEXT…",
        help="Plain text, *.jsonl with `turns`, `input` or `text` on each line, or folders. "
        "The last tenth of each file is held out.",
    ),
]
OutFolder = Annotated[Path, typer.Option(metavar="DIR", help="For the head and its report.")]
HeldOutFiles = Annotated[
    list[Path] | None,
    unset(
        "More to measure on, never learned from. May be repeated.",
        metavar="FILE",
        rich_help_panel=_DATA,
    ),
]
NumAnswers = Annotated[
    int, typer.Option(min=1, help="Answers of the model's own.", rich_help_panel=_DATA)
]
NumInvented = Annotated[
    int,
    typer.Option(
        min=0, help="Of these to questions that it makes up itself.", rich_help_panel=_DATA
    ),
]
AnswerTokens = Annotated[
    int, typer.Option(min=8, help="Of one answer, at most.", rich_help_panel=_DATA)
]
PromptTokens = Annotated[
    int,
    typer.Option(
        min=16,
        help="Of one prompt, at most; of a longer one the end is used.",
        rich_help_panel=_DATA,
    ),
]
NumMeasured = Annotated[
    int, typer.Option(min=1, help="Held-out answers of each file.", rich_help_panel=_DATA)
]
DraftVocab = Annotated[
    int,
    typer.Option(min=2, help="Tokens that it can propose: the likeliest.", rich_help_panel=_HEAD),
]
MlpSize = Annotated[
    int | None,
    unset("Of its MLP; by default the model's.", min=8, rich_help_panel=_HEAD),
]
SeenLayers = Annotated[
    str | None,
    unset(
        "Of the model, from 0: whose outputs it sees; by default as published heads do.",
        metavar="L,M,H",
        rich_help_panel=_HEAD,
    ),
]
OwnLmHead = Annotated[
    bool,
    typer.Option(
        "--own-lm-head",
        help="An LM head of its own instead of the model's rows: larger, and other engines "
        "can read it.",
        rich_help_panel=_HEAD,
    ),
]
NumSteps = Annotated[int, typer.Option(min=1, help="Batches.", rich_help_panel=_COURSE)]
BatchTokens = Annotated[int, typer.Option(min=128, help="Of a batch.", rich_help_panel=_COURSE)]
LearningRate = Annotated[
    float, typer.Option(min=1e-7, max=1.0, help="At its highest.", rich_help_panel=_COURSE)
]
UnrolledTokens = Annotated[
    int,
    typer.Option(
        min=1, max=8, help="Tokens it drafts from its own output.", rich_help_panel=_COURSE
    ),
]
TimeLimit = Annotated[
    float | None,
    unset(
        "Training ends then, with its learning rate fallen in time.",
        metavar="SECONDS",
        min=1,
        rich_help_panel=_COURSE,
    ),
]
TrainingSeed = Annotated[
    int, typer.Option(min=0, help="Decides all that is drawn.", rich_help_panel=_COURSE)
]
CheckpointEvery = Annotated[int, typer.Option(min=1, help="Steps.", rich_help_panel=_COURSE)]
TrainingDevice = Annotated[str, typer.Option(metavar="auto|cpu|cuda")]
TrainingDtype = Annotated[
    str, typer.Option(metavar="auto|bfloat16|float32", help="auto: bfloat16 on CUDA.")
]
TrainingPlots = Annotated[
    Path | None,
    unset("Draw losses and acceptance there.", metavar="DIR"),
]
