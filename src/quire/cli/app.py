"""The command tree of `quire`, and the one place where errors become sentences and exit codes.

Torch is imported only by the commands that need it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from quire import __version__
from quire.cli import bench, config, flags, pd, replay, route, serve, sim, store, top, train
from quire.cli.output import EXIT_ERROR, AsJson, complain, progress_bar, tell
from quire.errors import QuireError
from quire.sizes import parse_size

app = typer.Typer(
    name="quire",
    help="A three-tier KV cache for LLM inference: device, host and shared store.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=f"{flags.WHERE_THE_REST_IS} Example: [bold]quire serve --port 8080[/bold]")(
    serve.serve
)
app.command(
    epilog="Example: [bold]quire route --prefill http://10.0.0.5:8000 --decode "
    "http://10.0.0.6:8000[/bold]"
)(route.route)
app.command(epilog="Example: [bold]quire pd --port 8080[/bold]")(pd.pd)
app.command(epilog="Example: [bold]quire config --host-memory 8GiB[/bold]")(config.config)
app.command(epilog=replay.EXAMPLES)(replay.replay)
app.command(epilog="Example: [bold]quire profile --model /models/llama-3.1-8b[/bold]")(
    replay.profile
)
app.command(epilog=top.EXAMPLE)(top.top)
app.command(epilog=train.EXAMPLE)(train.train_eagle)
app.add_typer(bench.app, name="bench")
app.add_typer(store.app, name="store")
app.add_typer(sim.app, name="sim")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Also leaves by SystemExit, as typer does."""
    try:
        command = _without_types_of_flags(typer.main.get_command(app))
        command(args=None if arguments is None else list(arguments), prog_name="quire")
    except QuireError as error:
        sys.stdout.flush()
        complain(str(error))
        return EXIT_ERROR
    return 0


def _without_types_of_flags(command: Any, parent: typer.Context | None = None) -> Any:
    """What takes no value needs no `<bool>` in the help."""
    context = typer.Context(command, parent=parent, **command.context_settings)
    for param in command.get_params(context):
        if getattr(param, "is_flag", False):
            param.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _without_types_of_flags(each, context)
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """A three-tier KV cache for LLM inference: device, host and shared store."""


@app.command(epilog="Example: [bold]quire demo --host-memory 512MiB[/bold]")
def demo(
    host_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the host tier.")
    ] = "64MiB",
    directory: Annotated[
        Path | None,
        typer.Option(help="Where to put the demo's store; by default the temporary directory."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A short run through all tiers, with every byte checked."""
    from quire.demo import run

    size_bytes = parse_size(host_memory)
    with progress_bar() as progress:
        report = run(host_bytes=size_bytes, directory=directory, progress=progress)
    tell(report.as_dict(), *report.renderables(), as_json=as_json)
