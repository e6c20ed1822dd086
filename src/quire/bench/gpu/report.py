"""`quire bench gpu` as tables for people: every figure beside its floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import RenderableType

from quire.bench.gpu.plan import Part
from quire.bench.gpu.sets import later
from quire.bench.report import new_table

Result = dict[str, Any]


def tables(result: Result) -> list[RenderableType]:
    machine = result["machine"]
    parts: list[tuple[Part, Callable[[Any], Iterable[RenderableType]]]] = [
        (Part.DECODE, _decode),
        (Part.PREFILL, _prompts),
        (Part.COPIES, _copies),
        (Part.HITS, _hits),
        (Part.CROSSOVER, _crossover),
        (Part.SETS, _sets),
    ]
    head = (
        f"{result['shape']}, random weights, bfloat16, on {machine['name']}: memory "
        f"{machine['memory_bytes_s'] / 1e12:.2f} TB/s, matrices "
        f"{machine['matmul_ops_s'] / 1e12:.0f} TFLOP/s, link "
        f"{machine['link_bytes_s'] / 1e9:.1f} GB/s"
    )
    found = [(show, result[part.value]) for part, show in parts if part.value in result]
    failed = [f"{part} could not be measured: {why}" for part, why in result["failed"].items()]
    return [head, *(table for show, rows in found for table in show(rows)), *failed]


def _table(title: str, names: Iterable[str], rows: Iterable[Iterable[str]]) -> RenderableType:
    table = new_table(title)
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _decode(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "Decoding: ms from token to token",
        ("requests", "context", "greedy", "floor", "of the floor", "drawn", "drawn ÷ greedy"),
        (
            (
                str(row["batch"]),
                f"{row['context']:,}",
                f"{row['greedy_ms']:.2f}",
                f"{row['floor_ms']:.2f}",
                f"{row['share_of_floor']:.0%}",
                f"{row['drawn_ms']:.2f}",
                f"{row['drawn_ms'] / row['greedy_ms']:.2f}",
            )
            for row in rows
        ),
    )


def _prompts(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "Prompts: ms to the first token",
        ("tokens", "chunk", "took", "floor", "of the floor", "TFLOP/s"),
        (
            (
                f"{row['tokens']:,}",
                f"{row['chunk']:,}",
                f"{row['ms']:.0f}",
                f"{row['floor_ms']:.0f}",
                f"{row['share_of_floor']:.0%}",
                f"{row['tflops']:.0f}",
            )
            for row in rows
        ),
    )


def _hits(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "Hits: ms to the first token, by where the prompt was",
        ("tokens", "nowhere", "device", "host", "host's floor", "store"),
        (
            (
                f"{row['tokens']:,}",
                f"{row['computed_ms']:.0f}",
                f"{row['device_ms']:.1f}",
                f"{row['host_ms']:.1f}",
                f"{row['floor_ms']:.1f}",
                f"{row['store_ms']:.1f}",
            )
            for row in rows
        ),
    )


def _crossover(found: Result) -> Iterable[RenderableType]:
    yield _table(
        f"A prompt of {found['tokens']:,} tokens in the store, ms to the first token: the choice "
        f"was right in {found['right_share']:.0%}, both at once up to {found['best_gain']:.2f} × "
        "faster than the better one",
        ("fetched ÷ computed", "GB/s at most", "compute", "fetch", "both", "chosen", "which"),
        (
            (
                f"{row['ratio']:.2f}",
                f"{row['bytes_s'] / 1e9:.2f}",
                *(f"{row[f'{way}_ms']:.0f}" for way in ("compute", "fetch", "both", "chosen")),
                ", ".join(dict.fromkeys(row["chosen"])),
            )
            for row in found["rows"]
        ),
    )


def _copies(found: Result) -> Iterable[RenderableType]:
    yield _table(
        "Copies: GB/s beside plain copies of pinned memory",
        ("page", "way", "order", "GB/s", "plain", "of plain"),
        (
            (
                str(row["page_size"]),
                row["way"],
                row["order"],
                f"{row['bytes_s'] / 1e9:.1f}",
                f"{row['plain_bytes_s'] / 1e9:.1f}",
                f"{row['share']:.1%}",
            )
            for row in found["link"]
        ),
    )
    yield _table(
        "Decoding while copies fill the link: ms from token to token",
        ("requests", "context", "alone", "loads", "backups", "both", "GB/s both"),
        (
            (
                str(row["batch"]),
                f"{row['context']:,}",
                f"{row['alone_ms']:.2f}",
                *(
                    f"{row[f'{way}_ms']:.2f} ({row[f'{way}_slower']:+.1%})"
                    for way in ("load", "backup", "both")
                ),
                f"{row['both_bytes_s'] / 1e9:.1f}",
            )
            for row in found["beside"]
        ),
    )
    yield _table(
        "Nothing reused: tokens a second",
        ("tiers", "with them", "without", "share"),
        (
            (
                row["tiers"],
                f"{row['tokens_s']:,.0f}",
                f"{row['off_tokens_s']:,.0f}",
                f"{row['share']:.1%}",
            )
            for row in found["fresh"]
        ),
    )


def _sets(rows: list[Result]) -> Iterable[RenderableType]:
    if not rows:
        return
    yield _table(
        "Sessions, round by round: reused, ms to the first token in the mean, requests a second",
        ("set ÷ device", "tiers", *(f"round {i}" for i in range(1, len(rows[0]["rounds"]) + 1))),
        (
            (
                f"{row['times_device']:.1f}",
                row["tiers"],
                *(
                    f"{one['hit']:.0%}  {one['ttft_s'] * 1e3:,.0f}  {one['requests_s']:.2f}"
                    for one in row["rounds"]
                ),
            )
            for row in rows
        ),
    )
    alone = {row["times_device"]: row for row in rows if row["tiers"] == "L1"}
    yield _table(
        "The same beside the device alone, from the second round on",
        ("set ÷ device", "tiers", "reused", "throughput", "first token"),
        (
            (
                f"{row['times_device']:.1f}",
                row["tiers"],
                f"{later(row, 'hit'):.0%}",
                f"{later(row, 'requests_s') / later(base, 'requests_s'):.1f} ×",
                f"{later(row, 'ttft_s') / later(base, 'ttft_s') - 1:+.0%}",
            )
            for row in rows
            if (base := alone[row["times_device"]]) is not row
        ),
    )
