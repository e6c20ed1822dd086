"""`quire replay` and `quire profile`: how much memory a workload is worth, before it is bought."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from quire.cli import flags
from quire.cli.extras import PLOTS, SERVE, needs
from quire.cli.output import AsJson, complain, progress_bar, show, show_json, unset
from quire.config import WritePolicy
from quire.errors import ConfigError
from quire.models import cache_dir
from quire.replay import report
from quire.replay.occupancy import Occupancy
from quire.replay.profile import Profile, read_profile
from quire.replay.run import ReplayOptions
from quire.replay.sweep import SizedTier, sweep
from quire.replay.synthetic import Chats, chats
from quire.replay.trace import Trace, read_trace
from quire.settings import check, effective, engine_config, probe, served_name
from quire.sizes import format_bytes, parse_size

EXAMPLES = (
    "Examples: [bold]quire replay requests.jsonl --device 40GiB --host 256GiB[/bold], "
    "[bold]quire replay --groups 20 --vary store --store 1TiB --plot buy.png[/bold]"
)
CACHE = "The cache"
WORKLOAD = "The workload"
MACHINE = "The machine"
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
LLAMA_BYTES = 128 << 10
"""KV cache of a token of Llama 3.1 8B in half precision."""
_PROFILE_STORE = "4GiB"

_Trace = Annotated[
    Path | None,
    typer.Argument(
        metavar="[TRACE]",
        help="Requests as JSON lines: Mooncake's format, or what `quire serve --record` wrote.",
        show_default=False,
    ),
]
_Sizes = Annotated[
    str | None,
    unset(
        "Sizes of the varied tier. [dim]\\[a quarter of its size to four times of it][/dim]",
        metavar="SIZE,…",
        rich_help_panel=CACHE,
    ),
]
_BytesPerToken = Annotated[
    str | None,
    unset(
        "KV cache of one token. [dim]\\[the profile's, else the trace's, else 128 KiB as for "
        "Llama 3.1 8B][/dim]",
        metavar="SIZE",
        rich_help_panel=MACHINE,
    ),
]
_ProfileFile = Annotated[
    Path | None,
    unset(
        "Of the machine, for times to the first token. [dim]\\[what quire profile wrote "
        "last][/dim]",
        "--profile",
        metavar="FILE",
        rich_help_panel=MACHINE,
    ),
]


def _size(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(metavar="SIZE", help=help, rich_help_panel=CACHE)
    return option


def _share(help: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        min=0.0, max=0.99, metavar="SHARE", help=help, rich_help_panel=WORKLOAD
    )
    return option


def replay(
    trace: _Trace = None,
    device: Annotated[str, _size("Device memory for pages.")] = "64GiB",
    host: Annotated[str, _size("Host memory for pages.")] = "256GiB",
    store: Annotated[str, _size("Budget of the store; 0: there is none.")] = "0",
    vary: Annotated[
        SizedTier, typer.Option(help="Whose size is varied.", rich_help_panel=CACHE)
    ] = SizedTier.HOST,
    sizes: _Sizes = None,
    write_policy: Annotated[
        WritePolicy, typer.Option(help="When pages go to the host.", rich_help_panel=CACHE)
    ] = WritePolicy.WRITE_THROUGH,
    in_use: Annotated[float, _share("Of the device, by running requests.")] = 0.3,
    burst: Annotated[float, _share("Of the device, for a tenth of the time; 0: none.")] = 0.0,
    groups: Annotated[
        int,
        typer.Option(
            min=0,
            help="Without TRACE: chats made up, with so many shared system prompts.",
            rich_help_panel=WORKLOAD,
        ),
    ] = 0,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Only so many requests.", rich_help_panel=WORKLOAD),
    ] = None,
    bytes_per_token: _BytesPerToken = None,
    profile_file: _ProfileFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw it, as a PNG.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace of requests through the real cache: what each size of memory finds.

    In virtual time, beside an ideal LRU and Belady's bound, with what the next GiB would bring.
    """
    if plot is not None:  # what is wrong with it is said before the time is spent
        needs("bench", PLOTS)
        if plot.suffix != ".png" or not plot.parent.is_dir():
            raise ConfigError(f"--plot is {str(plot)!r}: name a .png in a directory that exists")
    requests = _requests(trace, groups, limit)
    machine = find_profile(profile_file)
    page_bytes = requests.block_tokens * _bytes_per_token(bytes_per_token, machine, requests)
    options = ReplayOptions(
        device_pages=_pages(device, page_bytes, "--device"),
        host_pages=_pages(host, page_bytes, "--host"),
        store_pages=_pages(store, page_bytes, "--store") if parse_size(store) else 0,
        occupancy=Occupancy(in_use, burst),
        write_policy=write_policy,
    )
    wanted = _wanted(sizes, options, vary, page_bytes)
    with progress_bar() as progress:
        result = sweep(
            requests,
            options,
            wanted,
            tier=vary,
            page_bytes=page_bytes,
            profile=machine,
            progress=progress,
        )
    if plot is not None:
        from quire.replay.plot import write

        write(result, plot)
    if as_json:
        show_json(result)
        return
    show(*report.tables(result))
    if plot is not None:
        print(f"Drawn: {plot}")


@flags.taking("model", "device", "dtype", "forward", "tp", "device_memory", "host_memory", "store")
def profile(
    given: flags.Given,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where it is kept; by default where replay looks."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure once how fast this machine computes, loads and fetches, for `quire replay`."""
    needs("serve", SERVE)
    import msgspec

    from quire.models import resolve
    from quire.replay.measure import measure

    loaded = given.loaded()
    machine = probe()
    settings = effective(loaded.settings, machine)
    for warning in check(loaded, settings, machine):
        complain(warning)
    cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="profile-", dir=cache_dir()))
    try:
        with progress_bar() as progress:
            directory = resolve(settings.model, lambda what, share: None)
            config = engine_config(settings, machine, directory, served_name(settings.model))
            if loaded.settings.store is None:  # a store of its own, on the same disk
                url = f"{folder.as_uri()}/store?max={_PROFILE_STORE}"
                config = msgspec.structs.replace(config, store=url)
            found = asyncio.run(measure(config, progress=progress))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    path = output or _default_profile()
    found.write(path)
    if as_json:
        show_json(msgspec.to_builtins(found))
        return
    show(report.profile_table(found))
    print(f"Kept in {path}")


def _requests(trace: Path | None, groups: int, limit: int | None) -> Trace:
    if (trace is None) == (groups == 0):
        raise ConfigError("give a trace, or --groups for chats that are made up: one of the two")
    if trace is not None:
        return read_trace(trace, limit=limit)
    return chats(Chats(groups) if limit is None else Chats(groups, requests=limit))


def _default_profile() -> Path:
    return cache_dir() / "profile.json"


def find_profile(file: Path | None) -> Profile | None:
    """This one, or what `quire profile` wrote last, if it did. Raises ConfigError."""
    if file is not None:
        return read_profile(file)
    return read_profile(_default_profile()) if _default_profile().exists() else None


def _bytes_per_token(given: str | None, profile: Profile | None, trace: Trace) -> int:
    if given is not None:
        size = parse_size(given)
        if size < 1:
            raise ConfigError("--bytes-per-token is 0: give the size of one token's KV cache")
        return size
    if profile is not None:
        return profile.bytes_per_token
    return trace.bytes_per_token or LLAMA_BYTES


def _pages(text: str, page_bytes: int, option: str) -> int:
    pages = parse_size(text) // page_bytes
    if not pages:
        raise ConfigError(
            f"{option} is {text}, and one block of tokens needs {format_bytes(page_bytes)}: give "
            "it more"
        )
    return pages


def _wanted(
    sizes: str | None, options: ReplayOptions, tier: SizedTier, page_bytes: int
) -> list[int]:
    if sizes is not None:
        return [_pages(each, page_bytes, "--sizes") for each in sizes.split(",")]
    base = int(getattr(options, f"{tier.value}_pages"))
    if not base:
        raise ConfigError(f"--vary {tier.value} needs a size: give --{tier.value} or --sizes")
    return [max(int(base * factor), 1) for factor in FACTORS]
