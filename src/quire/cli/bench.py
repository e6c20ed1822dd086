"""`quire bench`: run a benchmark of quire.bench and print its result. Those of parts are here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli import bench_engines, bench_serve, evidence, store_measure
from quire.cli.devices import check_device
from quire.cli.output import AsJson, conclude, progress_bar, tell
from quire.errors import ConfigError

app = typer.Typer(
    help="Measure servers, the metadata path, the file store and the copies between tiers.",
    no_args_is_help=True,
)
app.command(
    epilog="Example: [bold]quire bench serve http://127.0.0.1:8000 --plots plots[/bold]",
)(bench_serve.serve)
app.command(epilog="Example: [bold]quire bench ttft --repeats 3[/bold]")(bench_serve.ttft)
app.command(epilog="Example: [bold]quire bench gpu --shape llama-3.1-8b --json[/bold]")(
    bench_engines.gpu
)
app.command(epilog="Example: [bold]quire bench speculate --chat questions.jsonl --json[/bold]")(
    bench_engines.speculate
)
app.command(epilog="Example: [bold]quire bench peers --rounds 8 --plots plots[/bold]")(
    bench_engines.peers
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
    tell(result, *report.core(result), as_json=as_json)


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
    rounds: store_measure.Rounds = 8,
    as_json: AsJson = False,
) -> None:
    """The file store beside raw direct I/O; or, by its URL, any store beside its own client.

    Files on the same disk and in the same run; a URL as quire store bench takes it.
    """
    from quire.bench import report

    url = path if "://" in path else Path(path).absolute().as_uri()
    found = store_measure.compare(url, total, page or ("360KiB", "2MiB"), rounds)
    tell({"pages": found}, *report.store(found), as_json=as_json)


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
