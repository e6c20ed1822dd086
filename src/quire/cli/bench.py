"""`quire bench`: run a benchmark of quire.bench and print its result."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli import bench_serve, evidence, store_measure
from quire.cli.devices import check_device
from quire.cli.extras import PLOTS, SERVE, needs
from quire.cli.output import AsJson, conclude, progress_bar, show, show_json, start_bar
from quire.errors import ConfigError, StoreError
from quire.sizes import parse_size

app = typer.Typer(
    help="Measure servers, the metadata path, the file store and the copies between tiers.",
    no_args_is_help=True,
)
app.command(
    epilog="Example: [bold]quire bench serve http://127.0.0.1:8000 --plots plots[/bold]",
)(bench_serve.serve)
app.command(epilog="Example: [bold]quire bench ttft --repeats 3 --rounds 10[/bold]")(
    bench_serve.ttft
)
evidence.add_to(app)


@app.command(epilog="Example: [bold]quire bench core --rounds 1 --json[/bold]")
def core(
    rounds: Annotated[int, typer.Option(min=1, help="Runs per workload; the fastest counts.")] = 5,
    as_json: AsJson = False,
) -> None:
    """What the metadata path costs per request: match, lease, allocate, evict, insert."""
    from quire.bench import core as bench
    from quire.bench import report

    with progress_bar() as progress:
        result = bench.run(rounds=rounds, progress=progress)
    if as_json:
        show_json(result)
    else:
        show(*report.core(result))


@app.command(epilog="Example: [bold]quire bench store /mnt/nvme --total 1GiB[/bold]")
def store(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH|URL",
            help="Directory on the disk to measure, or a store's URL; left as it was.",
        ),
    ] = ".",
    total: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes written and read per round.")
    ] = "512MiB",
    page: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="Page size; repeat for several. [360KiB, 2MiB]"),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the raw side.")] = 8,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds, better an even number; medians are shown.")
    ] = 8,
    as_json: AsJson = False,
) -> None:
    """The file store beside raw direct I/O on the same disk, in the same run; or, by its URL, any
    store beside its own client, as quire store bench does."""
    if "://" in path:
        for size in page or ["2MiB"]:
            store_measure.bench(path, total, size, rounds, as_json)
        return
    from quire.bench import report
    from quire.bench import store as bench

    sizes = [parse_size(text) for text in page] if page else bench.PAGE_SIZES
    total_bytes = parse_size(total)
    _check_page_sizes(sizes, total_bytes)
    with progress_bar() as progress:
        try:
            result = bench.run(
                path,
                page_sizes=sizes,
                total_bytes=total_bytes,
                threads=threads,
                rounds=rounds,
                progress=lambda done, of: progress("file store", done, of),
            )
        except OSError as error:
            raise StoreError(
                f"cannot measure in {path!r} ({error.strerror}): "
                "give a directory that this user can write to"
            ) from error
    if as_json:
        show_json(result)
    else:
        show(*report.store(result))


@app.command(epilog="Example: [bold]quire bench transfer --device cuda --page-size 64[/bold]")
def transfer(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Model shape; repeat for several. [llama-3.1-8b, smollm2-135m]"),
    ] = None,
    page_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per page; repeat. [16, 64]")
    ] = None,
    pages: Annotated[
        int | None, typer.Option(min=1, help="Pages per copy; by default 32 MiB, 1 GiB on CUDA.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; medians are shown.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Copies between device and host, checked to the bit, beside a plain copy of as many bytes."""
    from quire.bench import report
    from quire.bench import transfer as bench

    check_device(device)
    shapes = shape or list(bench.SHAPES)
    for name in shapes:
        if name not in bench.SHAPES:
            raise ConfigError(f"--shape {name!r} is not known: use {' or '.join(bench.SHAPES)}")
    with progress_bar() as progress:
        result = bench.run(
            device,
            shapes,
            page_size or (16, 64),
            pages=pages,
            repeats=repeats,
            progress=lambda done, of: progress("copies", done, of),
        )
    conclude(result, report.transfer, as_json=as_json)


@app.command(epilog="Example: [bold]quire bench gpu --shape llama-3.1-8b --json[/bold]")
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
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the random weights there, a folder per shape, or use those that are there.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Put files of the store there: on a disk, or in memory. They are removed.",
            show_default=False,
        ),
    ] = None,
    device_memory: Annotated[str, typer.Option(metavar="SIZE", help="For pages.")] = "60GiB",
    host_memory: Annotated[str, typer.Option(metavar="SIZE", help="For pages.")] = "16GiB",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 64,
    seed: Annotated[int, typer.Option(help="Decides every prompt.")] = 0,
    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget-s",
            min=1,
            metavar="SECONDS",
            help="For all shapes: parts that would begin later are left out, and named.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what there is so far there, as JSON, after each part.",
            show_default=False,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write pictures there.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The engine beside what the hardware could do: decoding, prompts, copies, hits, sessions.

    In this process, on models of real shapes with random weights. Every figure stands beside its
    floor: bytes over the measured bandwidth, operations over the measured rate; the last table says
    what is asked of them, and which were met.
    """
    needs("serve", SERVE)
    check_device(device)
    from quire.bench.gpu import plan as plans
    from quire.bench.gpu import plots as gpu_plots
    from quire.bench.gpu import report as gpu_report
    from quire.bench.gpu import run as bench

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
    results: list[dict[str, Any]] = []
    end_s = None if budget_s is None else time.monotonic() + budget_s

    def tell(so_far: dict[str, Any]) -> None:
        if save is not None:
            save.write_text(json.dumps({"shapes": [*results, so_far]}, indent=1))

    for i, name in enumerate(shapes):
        plan = replace(common, shape=name, model=None if keep is None else keep / name)
        if end_s is not None:
            plan = replace(plan, budget_s=(end_s - time.monotonic()) / (len(shapes) - i))
        if name == "tiny":
            plan = replace(plan, **plans.SMALL)
        with progress_bar() as progress:
            results.append(bench.run(plan, progress, tell))
        if plots is not None:
            gpu_plots.write(results[-1], plots / name)
        if bench.INTERRUPTED in results[-1]["failed"]:
            break
    result = {"ok": not any(one["failed"] for one in results), "shapes": results}
    conclude(result, gpu_report.all_tables, as_json=as_json)


@app.command(epilog="Example: [bold]quire bench speculate --chat questions.jsonl --json[/bold]")
def speculate(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|FILE",
            help="By default SmolLM2-135M-Instruct, which comes with Quire.",
            show_default=False,
        ),
    ] = None,
    agent: Annotated[
        list[Path] | None,
        typer.Option(help="Lines of JSON with `input`; repeat for several.", show_default=False),
    ] = None,
    chat: Annotated[
        list[Path] | None,
        typer.Option(help="Lines of JSON with `turns`; repeat for several.", show_default=False),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="Beside off; repeat for several. [ngram, eagle]", show_default=False),
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Proposed together, at most.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="Of each workload.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Of a prompt, at most.")] = 1024,
    tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 128,
    at_once: Annotated[int, typer.Option(min=1, help="Requests computed together.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Over all prompts.")] = 1,
    threads: Annotated[int, typer.Option(min=0, help="Of the model; 0: all cores.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    impose: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="On a random model: the share of proposals to let through, whatever it says.",
            show_default=False,
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


def _check_page_sizes(sizes: list[int] | tuple[int, ...], total_bytes: int) -> None:
    from quire.memory.page_layout import BLOCK_BYTES

    for size in sizes:
        if size < BLOCK_BYTES or size % BLOCK_BYTES:
            raise ConfigError(
                f"--page {size}: a page is a multiple of {BLOCK_BYTES} bytes, such as 360KiB"
            )
        if size > total_bytes:
            raise ConfigError(
                f"--total {total_bytes} is less than one page of {size} bytes: raise --total"
            )


@app.command(epilog="Example: [bold]quire bench peers --rounds 8 --plots plots[/bold]")
def peers(
    python: Annotated[
        Path | None,
        typer.Option(
            help="Of an environment with vLLM, Quire and LMCache. Without it one is made, once, "
            "under the cache directory: 0.6 GB to download.",
            show_default=False,
        ),
    ] = None,
    lmcache: Annotated[
        bool, typer.Option(help="LMCache, in server mode, as a third side.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the sides take turns.")] = 8,
    sessions: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            help="Recorded sessions, whose turns are asked: JSON lines with `input` or `turns`, or "
            "a directory of such files; repeat for several.",
            show_default=False,
        ),
    ] = None,
    num_sessions: Annotated[int, typer.Option(min=1, help="Of them, so many at most.")] = 4,
    num_turns: Annotated[int, typer.Option(min=2, help="Of each, so many at most.")] = 6,
    length: Annotated[
        list[int] | None,
        typer.Option(min=64, max=1900, help="Tokens of a prompt; repeat for several. [256, 1024]"),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw the result there, as PNG.", show_default=False),
    ] = None,
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
    if as_json:
        show_json(result)
    else:
        show(*report.table(result))
