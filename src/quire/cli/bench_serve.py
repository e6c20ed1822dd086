"""`quire bench serve` and `quire bench ttft`: the benchmarks that talk to real servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from quire.cli.bench_options import (
    DeviceMemory,
    EmbeddedModel,
    HostMemory,
    ModelDevice,
    Plots,
    Seed,
    StoreFolder,
)
from quire.cli.extras import CLIENT, PLOTS, SERVE, needs
from quire.cli.output import (
    EXIT_FOUND,
    AsJson,
    conclude,
    progress_bar,
    start_bar,
    tell,
    unset,
)
from quire.errors import ConfigError
from quire.sizes import parse_size

if TYPE_CHECKING:
    from quire.bench.serve.conversations import ChatWorkload
    from quire.bench.ttft.run import ServedTiers

SYNTHETIC = "How large (counted in tokens of the served model)"
TARGET = "Whom to ask"

KEY_VARIABLES = ("QUIRE_API_KEY", "OPENAI_API_KEY")


def serve(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of the server, such as http://127.0.0.1:8000.")
    ],
    workload: Annotated[
        str, typer.Option(metavar="synthetic|agent|mtbench", help="What is said.")
    ] = "synthetic",
    sessions: Annotated[
        Path | None,
        unset("Recorded sessions, for agent and mtbench: a file, or a directory of *.jsonl."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Sessions.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each, at most.")] = 5,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    plots: Plots = None,
    as_json: AsJson = False,
    system_tokens: Annotated[
        int, typer.Option(min=0, help="Shared by all sessions.", rich_help_panel=SYNTHETIC)
    ] = 512,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="New in each round.", rich_help_panel=SYNTHETIC)
    ] = 256,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Of an answer, at most.", rich_help_panel=SYNTHETIC)
    ] = 64,
    seed: Annotated[int, typer.Option(help="Decides every prompt.", rich_help_panel=SYNTHETIC)] = 0,
    model: Annotated[
        str | None,
        unset("By default the first one served.", rich_help_panel=TARGET),
    ] = None,
    context: Annotated[
        int | None,
        unset(
            "Of the model, in tokens; by default what the server says.",
            min=1,
            rich_help_panel=TARGET,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Answers of full length (not every server can).",
            rich_help_panel=TARGET,
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds per request.", rich_help_panel=TARGET)
    ] = 600.0,
) -> None:
    """Sessions of several turns against a running server: TTFT, throughput, hits by tier.

    Any OpenAI-compatible server will do; its key is taken from QUIRE_API_KEY or OPENAI_API_KEY.
    Exit code 1 when an answer was wrong in form.
    """
    needs("bench", CLIENT if plots is None else CLIENT + PLOTS)
    from quire.bench.serve import run as bench
    from quire.bench.serve.conversations import Shape

    if "://" not in url:
        raise ConfigError(f"{url!r} is not a URL: write it as http://127.0.0.1:8000")
    target = bench.ServerTarget(url, model, _key(), context, timeout, ignore_eos)
    shape = Shape(count, rounds, system_tokens, prompt_tokens, output_tokens)
    load = bench.OfferedLoad(_kind(workload), shape, concurrency, seed, sessions)
    with progress_bar() as progress:
        result = bench.run(target, load, lambda done, of: progress("requests", done, of))
    _show(result, plots, as_json=as_json)


def _kind(name: str) -> ChatWorkload:
    from quire.bench.serve.conversations import ChatWorkload

    kinds = {kind.value: kind for kind in ChatWorkload}
    if name not in kinds:
        raise ConfigError(f"--workload {name!r} is not known: use {' or '.join(kinds)}")
    return kinds[name]


def _show(result: dict[str, Any], plots: Path | None, *, as_json: bool) -> None:
    from quire.bench.serve import plots as pictures
    from quire.bench.serve import report

    paths = [] if plots is None else pictures.write(result, plots)
    drawn = [escape(f"Drawn: {path}") for path in paths]
    said = {**result, "plots": [str(path) for path in paths]}
    tell(said, *report.tables(result), *drawn, as_json=as_json)
    if result["malformed"]:
        raise typer.Exit(EXIT_FOUND)


def ttft(
    model: EmbeddedModel = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts tried in every tier.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="About so many in each.")] = 4000,
    device: ModelDevice = "auto",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    directory: StoreFolder = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """What a hit in each tier saves: time to first token, computed and found.

    Starts a server of its own and stops it. Exit code 1 when an answer differs from the computed
    one, or was not found in the tier that it should have been.
    """
    needs("serve,bench", SERVE + CLIENT)
    from quire.bench.ttft import report as ttft_report
    from quire.bench.ttft import run as bench

    tiers = served_tiers(model, device, device_memory, host_memory, directory)
    with progress_bar() as progress:
        result = bench.run(
            tiers, prompt_tokens=prompt_tokens, repeats=repeats, seed=seed, progress=progress
        )
    conclude(result, ttft_report.tables, as_json=as_json)


def served_tiers(
    model: str | None,
    device: str,
    device_memory: str | None,
    host_memory: str | None,
    directory: Path | None,
) -> ServedTiers:
    """What is not given is as `quire serve` would have it. Raises ConfigError."""
    from quire.bench.ttft.run import CUDA_DEVICE_BYTES, GIB, ServedTiers
    from quire.models import resolve
    from quire.settings import effective, load, probe

    if directory is not None and not (directory.is_dir() and os.access(directory, os.W_OK)):
        raise ConfigError(
            f"cannot keep a store in {str(directory)!r}: give --directory a directory that this "
            "user can write to"
        )
    settings = effective(load({"device": device}, {}).settings, probe())
    assert settings.device is not None
    with start_bar() as starting:
        folder = resolve(model, starting)
    return ServedTiers(
        folder,
        settings.device,
        _size(device_memory, settings.device_memory or CUDA_DEVICE_BYTES),
        _size(host_memory, settings.host_memory or GIB),
        directory,
    )


def _key() -> str | None:
    return next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)


def _size(text: str | None, default: int) -> int:
    return default if text is None else parse_size(text)
