"""`quire store bench` and `quire store doctor`: how fast a store is, and whether it will help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.output import AsJson, progress_bar, tell, unset
from quire.errors import ConfigError
from quire.sizes import format_bytes, parse_size

if TYPE_CHECKING:
    from quire.bench.doctor import ProfiledMachine
    from quire.replay.profile import Profile

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Such as redis://cache:6379.", show_default=False)
]
Total = Annotated[str, typer.Option(metavar="SIZE", help="Bytes written and read, at most.")]
Page = Annotated[
    str, typer.Option(metavar="SIZE", help="Size of a page; 16 tokens of an 8B model: 2MiB.")
]
BLOCK = 4096


def bench(
    url: Url,
    total: Total = "128MiB",
    page: Page = "2MiB",
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds, better an even number; medians are shown.")
    ] = 12,
    as_json: AsJson = False,
) -> None:
    """A store beside its own client on the same bytes, in the same run. Leaves it as it was."""
    from quire.bench import report

    page_bytes, total_bytes = _sizes(page, total)
    with progress_bar() as progress:
        result = measure(
            url,
            page_bytes=page_bytes,
            total_bytes=total_bytes,
            rounds=rounds,
            progress=lambda done, of: progress("rounds", done, of),
        )
    tell(result, *report.any_store(result), as_json=as_json)


def measure(url: str, *, page_bytes: int, total_bytes: int, rounds: int, **more: Any) -> Any:
    """Of files beside the disk itself, of other stores beside their own client."""
    from quire.bench import anystore, store
    from quire.store.url import parse_url

    parsed = parse_url(url)
    how = {"total_bytes": total_bytes, "rounds": rounds, **more}
    if parsed.scheme != "file":
        return anystore.run(url, page_bytes=page_bytes, **how)
    result = store.run(parsed.path, page_sizes=[page_bytes], **how)
    (entry,) = result.pop("pages")
    client = f"direct I/O, {result['raw_threads']} threads, into one file"
    return {"url": f"file://{parsed.path}", "client": client, **result, **entry}


def doctor(
    url: Url,
    total: Total = "64MiB",
    page: Page = "1MiB",
    profile: Annotated[
        Path | None,
        unset("Of this machine. [dim]\\[what quire profile wrote last][/dim]", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a store will help on this machine. Leaves it as it was."""
    from quire.bench.doctor import examine
    from quire.cli.replay import find_profile

    known = find_profile(profile)
    page_bytes, total_bytes = _sizes(page, total)
    with progress_bar() as progress:
        found = examine(
            url,
            page_bytes=page_bytes,
            total_bytes=total_bytes,
            machine=None if known is None else machine_of(known),
            progress=progress,
        )
    tell(found.as_json(), *found.sentences, as_json=as_json)


def machine_of(profile: Profile) -> ProfiledMachine:
    """As the doctor wants it."""
    import msgspec

    from quire.bench.doctor import ProfiledMachine

    def ttft_s(num_tokens: int, from_store: int, bytes_per_s: float) -> float:
        here = msgspec.structs.replace(profile, store_bytes_per_s=bytes_per_s)
        return here.ttft_s(num_tokens, 0, 0, from_store)

    name = f"{profile.model} on {profile.device}"
    return ProfiledMachine(name, profile.bytes_per_token, profile.longest_tokens, ttft_s)


def _sizes(page: str, total: str) -> tuple[int, int]:
    page_bytes, total_bytes = parse_size(page), parse_size(total)
    if page_bytes < BLOCK or page_bytes % BLOCK:
        raise ConfigError(f"--page is {page}: give a multiple of {format_bytes(BLOCK)}")
    if total_bytes < page_bytes:
        raise ConfigError(f"--total is {total}, less than one page: give more")
    return page_bytes, total_bytes
