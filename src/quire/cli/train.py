"""`quire train-eagle`: a draft head for a model, trained on text and on what the model says."""

from __future__ import annotations

import time
from typing import Any

from rich.table import Table

from quire.cli import train_options as options
from quire.cli.extras import PLOTS, needs
from quire.cli.output import AsJson, complain, progress_bar, start_bar, tell
from quire.errors import ConfigError

EXAMPLE = (
    "Example: [bold]quire train-eagle embedded book.txt questions.jsonl --out head[/bold]. Stopped "
    "at any time, the same command goes on after the last checkpoint."
)


def train_eagle(
    model: options.TaughtModel,
    texts: options.TextFiles,
    out: options.OutFolder,
    held_out: options.HeldOutFiles = None,
    answers: options.NumAnswers = 4096,
    invented: options.NumInvented = 2048,
    answer_tokens: options.AnswerTokens = 192,
    prompt_tokens: options.PromptTokens = 1792,
    measured: options.NumMeasured = 48,
    draft_vocab: options.DraftVocab = 8192,
    mlp_size: options.MlpSize = None,
    layers: options.SeenLayers = None,
    own_lm_head: options.OwnLmHead = False,
    steps: options.NumSteps = 2000,
    batch_tokens: options.BatchTokens = 16384,
    learning_rate: options.LearningRate = 8e-4,
    unroll: options.UnrolledTokens = 5,
    time_limit: options.TimeLimit = None,
    seed: options.TrainingSeed = 0,
    checkpoint_every: options.CheckpointEvery = 250,
    device: options.TrainingDevice = "auto",
    dtype: options.TrainingDtype = "auto",
    plots: options.TrainingPlots = None,
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
        folder = resolve(None if model == options.EMBEDDED else model, starting)
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
    tell(
        {**report, "plots": [str(path) for path in paths]},
        _table(report),
        *(f"Drawn: {path}" for path in paths),
        as_json=as_json,
    )


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
