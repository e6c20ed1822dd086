"""`quire train-eagle`: a draft head for a model, trained on text and on what the model says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from quire.cli.extras import PLOTS, needs
from quire.cli.output import AsJson, complain, progress_bar, show, show_json, start_bar
from quire.errors import ConfigError

EMBEDDED = "embedded"
DATA = "What it learns from"
HEAD = "The head"
COURSE = "How it learns"
EXAMPLE = (
    "Example: [bold]quire train-eagle embedded book.txt questions.jsonl --out head[/bold]. Stopped "
    "at any time, the same command goes on after the last checkpoint."
)


def train_eagle(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"Directory or .gguf file; '{EMBEDDED}' is the one that comes with Quire.",
        ),
    ],
    texts: Annotated[
        list[Path],
        typer.Argument(
            metavar="TEXT…",
            help="Plain text, *.jsonl with `turns`, `input` or `text` on each line, or folders. "
            "The last tenth of each file is held out.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="For the head and its report.")],
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="More to measure on, never learned from. May be repeated.",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ] = None,
    answers: Annotated[
        int, typer.Option(min=1, help="Answers of the model's own.", rich_help_panel=DATA)
    ] = 4096,
    invented: Annotated[
        int,
        typer.Option(
            min=0, help="Of these to questions that it makes up itself.", rich_help_panel=DATA
        ),
    ] = 2048,
    answer_tokens: Annotated[
        int, typer.Option(min=8, help="Of one answer, at most.", rich_help_panel=DATA)
    ] = 192,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            min=16,
            help="Of one prompt, at most; of a longer one the end is used.",
            rich_help_panel=DATA,
        ),
    ] = 1792,
    measured: Annotated[
        int, typer.Option(min=1, help="Held-out answers of each file.", rich_help_panel=DATA)
    ] = 48,
    draft_vocab: Annotated[
        int,
        typer.Option(
            min=2, help="Tokens that it can propose: the likeliest.", rich_help_panel=HEAD
        ),
    ] = 8192,
    mlp_size: Annotated[
        int | None,
        typer.Option(
            min=8,
            help="Of its MLP; by default the model's.",
            show_default=False,
            rich_help_panel=HEAD,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="L,M,H",
            help="Of the model, from 0: whose outputs it sees; by default as published heads do.",
            show_default=False,
            rich_help_panel=HEAD,
        ),
    ] = None,
    own_lm_head: Annotated[
        bool,
        typer.Option(
            "--own-lm-head",
            help="An LM head of its own instead of the model's rows: larger, and other engines "
            "can read it.",
            rich_help_panel=HEAD,
        ),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Batches.", rich_help_panel=COURSE)] = 2000,
    batch_tokens: Annotated[
        int, typer.Option(min=128, help="Of a batch.", rich_help_panel=COURSE)
    ] = 16384,
    learning_rate: Annotated[
        float, typer.Option(min=1e-7, max=1.0, help="At its highest.", rich_help_panel=COURSE)
    ] = 8e-4,
    unroll: Annotated[
        int,
        typer.Option(
            min=1, max=8, help="Tokens it drafts from its own output.", rich_help_panel=COURSE
        ),
    ] = 5,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Training ends then, with its learning rate fallen in time.",
            show_default=False,
            rich_help_panel=COURSE,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Decides all that is drawn.", rich_help_panel=COURSE)
    ] = 0,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps.", rich_help_panel=COURSE)
    ] = 250,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda")] = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="auto|bfloat16|float32", help="auto: bfloat16 on CUDA.")
    ] = "auto",
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw losses and acceptance there.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train an EAGLE-3 draft head for a model, and measure how much of its drafts is accepted.

    It learns from the text and from the model's own answers to it. What comes out is a directory as
    such heads are published: config.json and model.safetensors, with report.json beside them.
    """
    needs("serve", ("transformers", "safetensors"))
    if plots is not None:
        needs("bench", PLOTS)
    import torch

    from quire.engine.draft.training import plots as pictures
    from quire.engine.draft.training import run as training
    from quire.engine.draft.training.collect import Amounts
    from quire.engine.draft.training.trainer import Course
    from quire.models import resolve

    on, as_dtype = _device(device), _dtype(dtype)
    with start_bar() as starting:
        folder = resolve(None if model == EMBEDDED else model, starting)
    plan = training.TrainingPlan(
        model=folder,
        texts=tuple(texts),
        held_out=tuple(held_out or ()),
        amounts=Amounts(answers, min(invented, answers), answer_tokens, prompt_tokens, measured),
        course=Course(steps, batch_tokens, learning_rate, unroll, seed, time_limit),
        draft_vocab_size=draft_vocab,
        mlp_size=mlp_size,
        layers=_layers(layers),
        own_lm_head=own_lm_head,
    )
    as_dtype = as_dtype or ("bfloat16" if on == "cuda" else "float32")
    place = training.TrainingPlace(
        out, torch.device(on), getattr(torch, as_dtype), checkpoint_every
    )
    try:
        with progress_bar() as progress:
            report = training.run(plan, place, time.monotonic, progress, complain)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the GPU has not enough memory for this: lower --batch-tokens (and give another --out, "
            "as it is another training), or use --device cpu"
        ) from error
    paths = [] if plots is None else pictures.write(report, plots)
    if as_json:
        show_json({**report, "plots": [str(path) for path in paths]})
    else:
        show(_table(report), *(f"Drawn: {path}" for path in paths))


def _device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not known: use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device here; use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _dtype(name: str) -> str | None:
    if name not in ("auto", "bfloat16", "float32"):
        raise ConfigError(f"--dtype {name!r} is not known: use auto, bfloat16 or float32")
    return None if name == "auto" else name


def _layers(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    try:
        low, middle, high = (int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--layers {text!r}: write three numbers, such as 1,14,26") from error
    return low, middle, high


def _table(report: dict[str, Any]) -> Table:
    """Acceptance by source and length of the chain."""
    size = report["head_bytes"] / 1e6
    table = Table(
        title=f"Tokens per step of the model, greedy, held out; the head: {size:.1f} MB",
        title_justify="left",
    )
    table.add_column("source")
    lengths = range(1, 1 + len(report["accepted"]["all"]["length"]))
    for name in ("tokens", *(f"k = {k}" for k in lengths)):
        table.add_column(name, justify="right")
    for source, result in report["accepted"].items():
        cells = (f"{length:.2f}" for length in result["length"])
        table.add_row(source, f"{result['tokens']:,}", *cells)
    return table
