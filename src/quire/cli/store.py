"""`quire store`: look after a store by hand. Opens what is there and creates nothing."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from quire.cli import store_measure
from quire.cli.output import EXIT_FOUND, AsJson, complain, progress_bar, show, show_json, tell
from quire.errors import StoreError
from quire.sizes import format_bytes
from quire.store import Mismatch, StoredObject, maintenance
from quire.store.maintenance import VerifyReport
from quire.store.opening import only_read
from quire.store.url import redact

app = typer.Typer(
    help="List, verify and clear the pages of a store; measure it; ask whether it will help.",
    no_args_is_help=True,
)
app.command(epilog="Example: [bold]quire store bench redis://cache:6379[/bold]")(
    store_measure.bench
)
app.command(epilog="Example: [bold]quire store doctor s3://bucket/pages[/bold]")(
    store_measure.doctor
)

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Such as file:///var/cache/quire.", show_default=False)
]
DEFAULT_ROWS = 20

FOREIGN = (
    "{pages} of another version of Quire left alone: use the version that wrote them, or give this "
    "one another store"
)
NOT_UNPACKED = (
    "{pages} left alone, packed with a codec that is not installed here: pip install "
    "quire[codecs], then verify again"
)
SEVERAL_MODELS = (
    "{count} models or layouts share this store ({each}): each reads only its own pages; clear the "
    "store, or give one of them another, if that is not meant"
)
DAMAGED = (
    "{pages} damaged ({reasons}), to be recomputed when asked for: move them out of the way with "
    "quire store verify --quarantine {url}"
)
QUARANTINED = (
    "{pages} damaged ({reasons}) and moved to quarantine, to be recomputed when asked for: nothing "
    "else needs to be done"
)
UNREADABLE = (
    "{pages} could not be read, so that nothing is known about the content: look at the store's "
    "disk or network, then verify again"
)


LEFT_ALONE = "{url} is only read and was left alone: to clear it, give it without write=never"


@app.command("ls", epilog="Example: [bold]quire store ls file:///var/cache/quire[/bold]")
def list_(
    url: Url,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help=f"Newest objects shown; by default {DEFAULT_ROWS}, all as JSON."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the pages of a store, newest first, and what they add up to."""
    objects = sorted(maintenance.list_objects(url), key=lambda item: -item.modified_s)
    if as_json:
        show_json(
            {
                "url": redact(url),
                "num_objects": len(objects),
                "num_bytes": sum(item.size_bytes for item in objects),
                "objects": [_object(item) for item in objects[:limit]],
            }
        )
        return
    shown = objects[: DEFAULT_ROWS if limit is None else limit]
    show(*_listing(objects, shown))


def _object(item: StoredObject) -> dict[str, Any]:
    name = item.name
    return {
        "key": name.key.hex(),
        "component": name.component,
        "shard": name.shard,
        "num_shards": name.num_shards,
        "size_bytes": item.size_bytes,
        "modified_s": item.modified_s,
    }


def _listing(objects: list[StoredObject], shown: list[StoredObject]) -> list[Any]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    totals: dict[str, list[int]] = defaultdict(list)
    for item in objects:
        totals[f"{item.name.component} in {item.name.num_shards} shard(s)"].append(item.size_bytes)
    newest = Table("key", "component", "shard", "size", "last used (UTC)", box=SIMPLE_HEAD)
    for item in shown:
        name = item.name
        when = datetime.fromtimestamp(item.modified_s, UTC)
        newest.add_row(
            f"{name.key.hex()[:16]}…",
            name.component,
            f"{name.shard} of {name.num_shards}",
            format_bytes(item.size_bytes),
            f"{when:%Y-%m-%d %H:%M:%S}",
        )
    parts: list[Any] = [newest] if shown else []
    for kind, sizes in sorted(totals.items()):
        parts.append(f"{kind}: {_pages(len(sizes))}, {format_bytes(sum(sizes))}")
    rest = len(objects) - len(shown)
    if rest:
        parts.append(f"{rest} older ones not shown: use --limit")
    return parts or ["The store is empty."]


@app.command(epilog="Example: [bold]quire store verify file:///var/cache/quire[/bold]")
def verify(
    url: Url,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Move damaged pages out of the way.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every page and check it against its own header and checksum.

    Exit code 1 when a page is damaged, unreadable or of another version, or cannot be unpacked.
    """
    with progress_bar() as progress:
        report = maintenance.verify(
            url,
            quarantine=quarantine,
            progress=lambda done, total: progress("verifying", done, total),
        )
    if as_json:
        show_json(_verdict(url, report))
    else:
        show(f"{report.num_ok} of {report.num_objects} pages are intact ({_size(report)}).")
        for sentence in explain(url, report):
            complain(sentence)
    if not report.is_clean:
        raise typer.Exit(EXIT_FOUND)


def _size(report: VerifyReport) -> str:
    gone = f", {report.num_gone} removed meanwhile" if report.num_gone else ""
    return f"{format_bytes(report.num_bytes)} read{gone}"


def _verdict(url: str, report: VerifyReport) -> dict[str, Any]:
    return {
        "url": redact(url),
        "clean": report.is_clean,
        "num_objects": report.num_objects,
        "num_bytes": report.num_bytes,
        "num_ok": report.num_ok,
        "num_gone": report.num_gone,
        "num_unreadable": report.num_unreadable,
        "num_quarantined": report.num_quarantined,
        "fingerprints": report.fingerprints,
        "mismatches": {why.value: count for why, count in report.mismatches.items()},
        "findings": explain(url, report),
    }


def explain(url: str, report: VerifyReport) -> list[str]:
    """One sentence, with what to do, for each kind of finding."""
    packed = report.mismatches.get(Mismatch.CODEC, 0)
    foreign = sum(n for why, n in report.mismatches.items() if why.is_foreign) - packed
    damaged = {why: n for why, n in report.mismatches.items() if not why.is_foreign}
    reasons = ", ".join(sorted(_words(why) for why in damaged))
    sentences = []
    if len(report.fingerprints) > 1:
        each = ", ".join(f"{name}… {_pages(n)}" for name, n in sorted(report.fingerprints.items()))
        sentences.append(SEVERAL_MODELS.format(count=len(report.fingerprints), each=each))
    if foreign:
        sentences.append(FOREIGN.format(pages=_pages(foreign)))
    if packed:
        sentences.append(NOT_UNPACKED.format(pages=_pages(packed)))
    if damaged:
        text = QUARANTINED if report.num_quarantined else DAMAGED
        sentences.append(
            text.format(pages=_pages(sum(damaged.values())), reasons=reasons, url=redact(url))
        )
    if report.num_unreadable:
        sentences.append(UNREADABLE.format(pages=_pages(report.num_unreadable)))
    return sentences


def _pages(count: int) -> str:
    return f"{count} page{'' if count == 1 else 's'}"


def _words(why: Mismatch) -> str:
    return why.value.replace("_", " ")


@app.command(epilog="Example: [bold]quire store clear --yes file:///var/cache/quire[/bold]")
def clear(
    url: Url,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove every page of a store, of every model. Asks first.

    Of several stores, those that are only read (write=never) are left alone.
    """
    count = sum(1 for _ in maintenance.list_objects(url, to_clear=True))
    if not yes:
        if as_json:
            raise StoreError("clear asks before it removes anything: give --yes with --json")
        typer.confirm(f"Remove {_pages(count)} from {redact(url)}?", abort=True, err=True)
    removed, left_alone = maintenance.clear(url), only_read(url)
    for each in left_alone:
        complain(LEFT_ALONE.format(url=each))
    tell(
        {"url": redact(url), "num_removed": removed, "left_alone": left_alone},
        f"{_pages(removed)} removed.",
        as_json=as_json,
    )
