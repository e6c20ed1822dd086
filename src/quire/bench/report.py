"""Results of the benchmarks as tables for people. Knows their JSON shapes, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from quire.sizes import format_bytes

Result = dict[str, Any]


def new_table(title: str | None = None) -> Table:
    """Narrow enough for a terminal of 80 columns."""
    return Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def count_of(found: int, of: int) -> str:
    text = f"{found} of {of}"
    return text if found == of else f"[bold red]{text}[/]"


def percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def verdict(ratio: Result, target: float) -> str:
    """Only what the whole interval says is said."""
    if ratio["high"] - 1 <= target:
        return "reached"
    if ratio["low"] - 1 > target:
        return "[bold red]missed[/]"
    return "[yellow]undecided[/], as the noise is larger: give more --rounds on a quiet machine"


def core(result: Result) -> list[RenderableType]:
    """See bench.core.run: workloads by name, and "flatness"."""
    table = new_table("Metadata path, CPU time of the step thread")
    table.add_column("workload", no_wrap=True)
    for name in ("requests", "pages reused"):
        table.add_column(name, justify="right")
    for name in ("µs per request", "no store", "bytes per token", "no store"):
        table.add_column(name, justify="right")
    for name, row in result.items():
        if name == "flatness":
            continue
        table.add_row(
            name,
            f"{row['requests']:,}",
            f"{row['hit_rate']:.1%}",
            f"{row['us_per_request']:.1f}",
            f"{row['us_per_request_no_store']:.1f}",
            f"{row['bytes_per_token']:.2f}",
            f"{row['bytes_per_token_no_store']:.2f}",
        )
    items: list[RenderableType] = [table]
    for what, flat in result.get("flatness", {}).items():
        (few, many), (before, after) = flat["numbers"], flat["us_per_request"]
        items.append(
            f"{few:,} {what}: {before:.1f} µs per request; {many:,} {what}: {after:.1f} µs "
            f"({flat['ratio']:.2f} times)"
        )
    return items


def store(result: Result) -> list[RenderableType]:
    """See bench.store.run."""
    table = new_table("File store beside raw direct I/O, checksums on")
    table.add_column("page")
    table.add_column("way")
    for name in ("store GB/s", "raw GB/s", "ratio", "ratios seen"):
        table.add_column(name, justify="right")
    for entry in result["pages"]:
        for way in ("write", "read"):
            row = entry[way]
            table.add_row(
                format_bytes(entry["page_bytes"]),
                way,
                f"{row['store_gb_s']:.2f}",
                f"{row['raw_gb_s']:.2f}",
                f"{row['ratio']:.2f}",
                f"{row['ratio_min']:.2f}–{row['ratio_max']:.2f}",
            )
    note = (
        f"{result['rounds']} rounds of {format_bytes(result['bytes_per_round'])}, "
        f"raw I/O with {result['raw_threads']} threads; medians"
    )
    return [table, note]


def any_store(result: Result) -> list[RenderableType]:
    """See bench.anystore.run."""
    table = new_table(f"{result['url']}, checksums on")
    table.add_column("way")
    for name in ("store GB/s", "own client", "ratio", "quartiles", "ratios seen"):
        table.add_column(name, justify="right")
    for way in ("write", "read"):
        row = result[way]
        compared = [""] * 4
        if "ratio" in row:
            first, third = row["ratio_quartiles"]
            span = f"{row['ratio_min']:.2f}–{row['ratio_max']:.2f}"
            compared = [f"{row['raw_gb_s']:.2f}", f"{row['ratio']:.2f}"]
            compared += [f"{first:.2f}–{third:.2f}", span]
        table.add_row(way, f"{row['store_gb_s']:.2f}", *compared)
    notes = [
        f"{result['rounds']} rounds of {format_bytes(result['bytes_per_round'])} in pages of "
        f"{format_bytes(result['page_bytes'])}; medians"
    ]
    if client := result.get("client"):
        notes.append(f"Its own client, with as many threads and pages per call: {client}")
    if probe := result.get("probe"):
        notes.append(
            f"A question about one page takes {probe['one_ms']:.2f} ms, about {probe['keys']} "
            f"pages {probe['all_ms']:.2f} ms"
        )
    return [table, *notes]


def transfer(result: Result) -> list[RenderableType]:
    """See bench.transfer.run."""
    table = new_table(f"Copies between device and host on {result['device']}")
    for name in ("shape", "dtype", "page", "layout", "way"):
        table.add_column(name, no_wrap=True)
    for name in ("GB/s", "plain", "ratio", "right"):
        table.add_column(name, justify="right")
    for case in result["cases"]:
        right = case["correct"] and case["layers_in_order"]
        table.add_row(
            case["shape"],
            case["dtype"],
            str(case["page_size"]),
            case["inner"],
            case["direction"],
            f"{case['gb_per_s']:.2f}",
            f"{case['plain_gb_per_s']:.2f}",
            f"{case['ratio']:.2f}",
            "yes" if right else "[bold red]NO[/bold red]",
        )
    if result["ok"]:
        verdict = "Every page was right to the bit, and every layer when it was waited for."
    else:
        verdict = "[bold red]Pages arrived wrong or too late: see the last column.[/bold red]"
    return [table, verdict]
