"""`quire store bench` and `quire store doctor`: how fast a store is, and whether it will help."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from quire.cli.output import AsJson, progress_bar, tell, unset
from quire.errors import ConfigError
from quire.sizes import format_bytes, parse_size
from quire.store.maintenance import MAX_OBJECT_BYTES

if TYPE_CHECKING:
    from quire.bench.doctor import ProfiledMachine
    from quire.replay.profile import Profile

_Url = Annotated[
    str, typer.Argument(metavar="URL", help="Such as redis://cache:6379.", show_default=False)
]
Total = Annotated[str, typer.Option(metavar="SIZE", help="Bytes written and read, at most.")]
Page = Annotated[
    str, typer.Option(metavar="SIZE", help="Size of a page; 16 tokens of an 8B model: 2MiB.")
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Rounds, better an even number; medians are shown.")
]
BLOCK = 4096


def bench(
    url: _Url,
    total: Total = "128MiB",
    page: Page = "2MiB",
    rounds: Rounds = 12,
    as_json: AsJson = False,
) -> None:
    """A store beside its own client on the same bytes, in the same run. Leaves it as it was."""
    from quire.bench import report

    (result,) = compare(url, total, [page], rounds)
    tell(result, *report.store([result]), as_json=as_json)


def compare(url: str, total: str, pages: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """For each size of a page. Raises ConfigError, StoreError."""
    from quire.bench import anystore

    sizes = [_sizes(page, total) for page in pages]
    found = []
    with progress_bar() as progress:
        for page, (page_bytes, total_bytes) in zip(pages, sizes, strict=True):
            found.append(
                anystore.run(
                    url,
                    page_bytes=page_bytes,
                    total_bytes=total_bytes,
                    rounds=rounds,
                    progress=partial(progress, f"pages of {page}"),
                )
            )
    return found


def doctor(
    url: _Url,
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
    tell(found.as_json(), *map(escape, found.sentences), as_json=as_json)


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
    if page_bytes > MAX_OBJECT_BYTES:
        most = format_bytes(MAX_OBJECT_BYTES)
        raise ConfigError(f"--page is {page}: no page is that large, give at most {most}")
    if total_bytes < page_bytes:
        raise ConfigError(f"--total is {total}, less than one page: give more")
    return page_bytes, total_bytes
