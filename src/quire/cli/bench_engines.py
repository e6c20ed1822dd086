"""`quire bench gpu`, `… speculate` and `… peers`: the benchmarks of whole engines."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.bench_options import Device, EmbeddedModel, PageSize, Plots, Seed
from quire.cli.devices import check_device
from quire.cli.extras import PLOTS, SERVE, needs
from quire.cli.output import AsJson, conclude, progress_bar, start_bar, tell, unset
from quire.errors import ConfigError
from quire.sizes import parse_size

if TYPE_CHECKING:
    from quire.bench.gpu.plan import GpuPlan


def gpu(
    shape: Annotated[
        str,
        typer.Option(metavar="SHAPES", help="Of the models: qwen3-8b, llama-3.1-8b, tiny."),
    ] = "qwen3-8b,llama-3.1-8b",
    only: Annotated[
        str,
        typer.Option(
            metavar="PARTS", help="Of decode, prefill, mixed, copies, hits, crossover, sets."
        ),
    ] = "decode,prefill,mixed,copies,hits,crossover,sets",
    device: Annotated[str, typer.Option(help="Where it runs: cuda or cpu.")] = "cuda",
    store: Annotated[
        Path | None,
        unset(
            "Put files of the store there: on a disk, or in memory. They are removed.",
            metavar="DIR",
        ),
    ] = None,
    device_memory: Annotated[str, typer.Option(metavar="SIZE", help="For pages.")] = "60GiB",
    host_memory: Annotated[str, typer.Option(metavar="SIZE", help="For pages.")] = "16GiB",
    page_size: PageSize = 64,
    seed: Seed = 0,
    budget_s: Annotated[
        float | None,
        unset(
            "For all shapes: parts that would begin later are left out, and named.",
            "--budget-s",
            min=1,
            metavar="SECONDS",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        unset("Write what there is so far there, as JSON, after each part.", metavar="FILE"),
    ] = None,
    plots: Plots = None,
    as_json: AsJson = False,
) -> None:
    """The engine beside what the hardware could do: decoding, prompts, copies, hits, sessions.

    In this process, on models of real shapes with random weights. Every figure stands beside its
    floor: bytes over the measured bandwidth, operations over the measured rate.
    """
    needs("serve", SERVE)
    check_device(device)
    from quire.bench.gpu import plan as plans
    from quire.bench.gpu import report as gpu_report

    shapes = plans.parse_shapes(shape)
    common = plans.GpuPlan(
        parts=plans.parse_parts(only),
        device=device,
        page_size=page_size,
        device_bytes=parse_size(device_memory),
        host_bytes=parse_size(host_memory),
        seed=seed,
        store=store,
    )
    for folder in filter(None, (store, save and save.parent)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used: {error.strerror or error}") from error
    wanted = [replace(common, shape=name) for name in shapes]
    results = _measure_shapes(wanted, budget_s, save, plots)
    result = {"ok": not any(one["failed"] for one in results), "shapes": results}
    conclude(result, gpu_report.all_tables, as_json=as_json)


def _measure_shapes(
    wanted: Sequence[GpuPlan], budget_s: float | None, save: Path | None, plots: Path | None
) -> list[dict[str, Any]]:
    """One after the other, each with its share of the time that is left."""
    from quire.bench.gpu import plots as gpu_plots
    from quire.bench.gpu import run as bench
    from quire.bench.gpu.plan import SMALL

    results: list[dict[str, Any]] = []
    end_s = None if budget_s is None else time.monotonic() + budget_s

    def tell(so_far: dict[str, Any]) -> None:
        if save is not None:
            save.write_text(json.dumps({"shapes": [*results, so_far]}, indent=1))

    for i, each in enumerate(wanted):
        plan = each
        if end_s is not None:
            plan = replace(plan, budget_s=(end_s - time.monotonic()) / (len(wanted) - i))
        if plan.shape == "tiny":
            plan = replace(plan, **SMALL)
        with progress_bar() as progress:
            results.append(bench.run(plan, progress, tell))
        if plots is not None:
            gpu_plots.write(results[-1], plots / plan.shape)
        if bench.INTERRUPTED in results[-1]["failed"]:
            break
    return results


def speculate(
    model: EmbeddedModel = None,
    agent: Annotated[
        list[Path] | None,
        unset("Lines of JSON with `input`; repeat for several."),
    ] = None,
    chat: Annotated[
        list[Path] | None,
        unset("Lines of JSON with `turns`; repeat for several."),
    ] = None,
    way: Annotated[
        list[str] | None,
        unset("Beside off; repeat for several. [ngram, eagle]"),
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Proposed together, at most.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Of each workload.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Of a prompt, at most.")] = 1024,
    tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 128,
    at_once: Annotated[int, typer.Option(min=1, help="Requests computed together.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Over all prompts.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="Of the model; 0: all cores.")] = 0,
    device: Device = "cpu",
    impose: Annotated[
        float | None,
        unset(
            "On a random model: the share of proposals to let through, whatever it says.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    shape: Annotated[str, typer.Option(help="Of the random model.")] = "qwen3-8b",
    as_json: AsJson = False,
) -> None:
    """What proposing tokens ahead saves: tokens per second beside those without, acceptance.

    Engines in this process, without a server. Exit code 1 when an answer differs, in float32.
    """
    needs("serve", SERVE)
    from quire.bench.speculate import report as speculate_report
    from quire.bench.speculate import run as bench
    from quire.bench.speculate.prompt_lines import read_workload
    from quire.models import EMBEDDED_NAME, load_tokenizer, resolve

    named = [(name, files) for name, files in (("agent", agent), ("chat", chat)) if files]
    if impose is None and not named:
        raise ConfigError("nothing would be asked: give --agent or --chat a file, or --impose")
    check_device(device)
    directory, workloads = None, []
    if impose is None:
        with start_bar() as starting:
            directory = resolve(model, starting)
        tokenizer = load_tokenizer(directory)
        workloads = [
            read_workload(name, files, tokenizer, count=prompts, max_tokens=prompt_tokens)
            for name, files in named
        ]
    plan = bench.SpeculatePlan(
        model=directory,
        name=shape if impose is not None else EMBEDDED_NAME if model is None else Path(model).name,
        ways=way or ["ngram", "eagle"],
        draft_tokens=draft_tokens,
        num_tokens=tokens,
        rounds=rounds,
        at_once=at_once,
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        device_bytes=(512 << 20) if device == "cpu" else (8 << 30),
        threads=threads,
        impose=impose,
        shape=shape if impose is not None else "",
    )
    with progress_bar() as progress:
        result = bench.run(plan, workloads, progress)
    conclude(result, speculate_report.tables, as_json=as_json)


def peers(
    python: Annotated[
        Path | None,
        unset(
            "Of an environment with vLLM, Quire and LMCache. Without it one is made, once, "
            "under the cache directory: 0.6 GB to download."
        ),
    ] = None,
    lmcache: Annotated[
        bool, typer.Option(help="LMCache, in server mode, as a third side.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns.")] = 8,
    sessions: Annotated[
        list[Path] | None,
        unset(
            "Recorded sessions, whose turns are asked: JSON lines with `input` or `turns`, or "
            "a directory of such files; repeat for several.",
            exists=True,
        ),
    ] = None,
    num_sessions: Annotated[int, typer.Option(min=1, help="Of them, so many at most.")] = 4,
    num_turns: Annotated[int, typer.Option(min=2, help="Of each, so many at most.")] = 6,
    length: Annotated[
        list[int] | None,
        typer.Option(min=64, max=1900, help="Tokens of a prompt; repeat for several. [256, 1024]"),
    ] = None,
    plots: Plots = None,
    as_json: AsJson = False,
) -> None:
    """vLLM alone, with Quire and with LMCache, on a CPU: what a hit saves, what a cache costs."""
    from quire.bench.peers import install, report, run
    from quire.bench.peers.sessions import read_sessions
    from quire.models import embedded_model, load_tokenizer
    from quire.models.cache import cache_dir

    needs("serve", SERVE)
    if plots is not None:
        needs("bench", PLOTS)
    if python is None:
        folder = cache_dir() / "peers"
        python = install.install(
            folder, lmcache=lmcache, say=lambda text: typer.echo(text, err=True)
        )
    lengths, model = tuple(length or (256, 1024)), embedded_model()
    said = () if not sessions else read_sessions(
        sessions, load_tokenizer(model), count=num_sessions, turns=num_turns,
        max_tokens=run.MAX_MODEL_LEN - 1,
    )  # fmt: skip
    plan = run.PeersPlan(python, model, lengths, rounds, tuple(said), lmcache=lmcache)
    with progress_bar() as progress:
        result = run.run(plan, progress)
    if plots is not None:
        report.plot(result, plots)
    tell(result, *report.tables(result), as_json=as_json)
