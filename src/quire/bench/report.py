"""Results of the benchmarks as tables for people. Knows their JSON shapes, measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from quire.bench import Result
from quire.sizes import format_bytes


def new_table(title: str | None = None) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    return Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


Show = Callable[[Any], str]


def table(
    title: str | None,
    rows: Sequence[Any],
    columns: Sequence[tuple[str, Show]],
    *,
    names: int = 1,
    wraps: bool = False,
    total_below: bool = False,
) -> RenderableType:
    """`columns`: each with its name, and what it shows of a row; the first `names` say which row it
    is, in one line if not `wraps`. `total_below`: the last row is of all."""
    shown = new_table(title)
    for number, (name, _) in enumerate(columns):
        is_name = number < names
        shown.add_column(
            name, justify="left" if is_name else "right", no_wrap=is_name and not wraps
        )
    for at, row in enumerate(rows, 1):
        is_last = total_below and at == len(rows) - 1
        shown.add_row(*(show(row) for _, show in columns), end_section=is_last)
    return shown


def number(name: str, digits: int = 0, scale: float = 1.0) -> Show:
    """Of that name, in so many of its units; nothing if it was not measured."""
    return lambda row: f"{row[name] / scale:,.{digits}f}" if name in row else "–"


def share(name: str, digits: int = 0) -> Show:
    return lambda row: f"{row[name]:.{digits}%}"


def text(name: str) -> Show:
    return lambda row: escape(str(row[name]))


def size(name: str) -> Show:
    return lambda row: format_bytes(int(row[name]))


def span(low: float, high: float) -> str:
    return f"{low:.2f}–{high:.2f}"


def interval(ratio: Result | None) -> str:
    """A ratio between what it is at least and at most."""
    return f"{ratio['ratio']:.2f} ({span(ratio['low'], ratio['high'])})" if ratio else "–"


def load(before: float, after: float) -> str:
    return f"Load of the machine before and after: {before:.1f}, {after:.1f}."


def count_of(found: int, of: int) -> str:
    text = f"{found} of {of}"
    return text if found == of else f"[bold red]{text}[/]"


def core(result: Result) -> list[RenderableType]:
    """See bench.core.run: workloads by name."""
    rows = [row | {"name": name} for name, row in result.items()]
    return [
        table(
            "Metadata path, CPU time of the step thread",
            rows,
            [
                ("workload", text("name")),
                ("requests", number("requests")),
                ("pages reused", share("hit_rate", 1)),
                ("µs per request", number("us_per_request", 1)),
                ("no store", number("us_per_request_no_store", 1)),
            ],
        )
    ]


def store(results: Sequence[Result]) -> list[RenderableType]:
    """See bench.anystore.run: one for each size of a page."""
    first = results[0]
    shown = table(
        f"{escape(first['url'])}, checksums on",
        [
            result[way] | {"page_bytes": result["page_bytes"], "way": way}
            for result in results
            for way in ("write", "read")
        ],
        [
            ("page", size("page_bytes")),
            ("way", text("way")),
            ("store GB/s", number("store_gb_s", 2)),
            ("own client", number("raw_gb_s", 2)),
            ("ratio", number("ratio", 2)),
            ("quartiles", lambda row: span(*row["ratio_quartiles"]) if "ratio" in row else "–"),
            ("ratios seen", _seen),
        ],
        names=2,
    )
    notes = [f"{first['rounds']} rounds of {format_bytes(first['bytes_per_round'])}; medians"]
    if not first["client"] and first["url"].startswith(("redis://", "rediss://")):
        notes.append(r"To compare it with redis-py: pip install 'quire\[bench]'")
    if first["client"]:
        notes.append(f"Its own client, moving the same bytes: {first['client']}")
    for result in results:
        if probe := result.get("probe"):
            notes.append(
                f"A question about one page takes {probe['one_ms']:.2f} ms, about {probe['keys']} "
                f"pages {probe['all_ms']:.2f} ms"
            )
    return [shown, *notes]


def _seen(row: Result) -> str:
    return span(row["ratio_min"], row["ratio_max"]) if "ratio" in row else "–"


def transfer(result: Result) -> list[RenderableType]:
    """See bench.transfer.run."""
    shown = table(
        f"Copies between device and host on {result['device']}",
        result["cases"],
        [
            ("shape", text("shape")),
            ("dtype", text("dtype")),
            ("page", text("page_size")),
            ("layout", text("inner")),
            ("way", text("direction")),
            ("GB/s", number("gb_per_s", 2)),
            ("plain", number("plain_gb_per_s", 2)),
            ("ratio", number("ratio", 2)),
            ("right", lambda case: "yes" if case["correct"] else "[bold red]NO[/bold red]"),
        ],
        names=5,
    )
    if result["ok"]:
        verdict = "Every page was right to the bit, and every layer when it was waited for."
    else:
        verdict = "[bold red]Pages arrived wrong or too late: see the last column.[/bold red]"
    return [shown, verdict]
