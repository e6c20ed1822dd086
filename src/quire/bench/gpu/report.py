"""`quire bench gpu` as tables for people: every figure beside its floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from quire.bench import Result
from quire.bench.gpu.plan import GpuPart
from quire.bench.gpu.sets import later
from quire.bench.report import Show, number, share, table, text


def tables(result: Result) -> list[RenderableType]:
    machine = result["machine"]
    parts: list[tuple[GpuPart, Callable[[Any], Iterable[RenderableType]]]] = [
        (GpuPart.DECODE, _decode),
        (GpuPart.PREFILL, _prompts),
        (GpuPart.MIXED, _mixed),
        (GpuPart.COPIES, _copies),
        (GpuPart.HITS, _hits),
        (GpuPart.CROSSOVER, _crossover),
        (GpuPart.SETS, _sets),
    ]
    head = (
        f"{result['shape']}, random weights, bfloat16, on {machine['name']}: memory "
        f"{machine['memory_bytes_s'] / 1e12:.2f} TB/s, matrices "
        f"{machine['matmul_ops_s'] / 1e12:.0f} TFLOP/s, link "
        f"{machine['link_bytes_s'] / 1e9:.1f} GB/s"
    )
    found = [(show, result[part.value]) for part, show in parts if part.value in result]
    failed = [
        escape(f"{part} could not be measured: {why}") for part, why in result["failed"].items()
    ]
    shown = (one for show, rows in found for one in show(rows))
    took = ", ".join(f"{part} {seconds:.0f}" for part, seconds in result["took_s"].items())
    return [head, *shown, f"Seconds of each part: {took}", *failed]


def all_tables(result: Result) -> list[RenderableType]:
    """Of every shape."""
    return [shown for one in result["shapes"] for shown in tables(one)]


_table = partial(table, names=0)


def _decode(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "Decoding: ms from token to token",
        rows,
        [
            ("requests", text("batch")),
            ("context", number("context")),
            ("greedy", number("greedy_ms", 2)),
            ("floor", number("floor_ms", 2)),
            ("of the floor", share("share_of_floor")),
            ("drawn", number("drawn_ms", 2)),
            ("drawn ÷ greedy", lambda row: f"{row['drawn_ms'] / row['greedy_ms']:.2f}"),
        ],
    )


def _prompts(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "Prompts: ms to the first token",
        rows,
        [
            ("tokens", number("tokens")),
            ("chunk", number("chunk")),
            ("took", number("ms")),
            ("floor", number("floor_ms")),
            ("of the floor", share("share_of_floor")),
            ("TFLOP/s", number("tflops")),
        ],
    )


def _mixed(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "A prompt beside others that decode: ms, and what it adds to their time",
        rows,
        [
            ("decoding", text("batch")),
            ("prompt", number("tokens")),
            ("chunk", number("chunk")),
            ("token alone", number("alone_ms", 2)),
            ("slowest", number("slowest_ms", 1)),
            ("chunk alone", number("last_chunk_ms", 1)),
            ("later ÷ chunk", number("times_chunk", 2)),
            ("added in all", number("added_ms")),
            ("prompt alone", number("own_ms")),
            ("ratio", number("times_own", 2)),
        ],
    )


def _hits(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "Hits: ms to the first token, by where the prompt was",
        rows,
        [
            ("tokens", number("tokens")),
            ("nowhere", number("computed_ms")),
            ("device", number("device_ms", 1)),
            ("and some more", number("more_ms", 1)),
            ("host", number("host_ms", 1)),
            ("host's floor", number("floor_ms", 1)),
            ("store", number("store_ms", 1)),
            ("store's floor", number("store_floor_ms", 1)),
        ],
    )


def _crossover(found: Result) -> Iterable[RenderableType]:
    ways = ("compute", "fetch", "both", "chosen")
    yield _table(
        f"A prompt of {found['tokens']:,} tokens in the store, ms to the first token: the choice "
        f"was right in {found['right_share']:.0%}, both at once up to {found['best_gain']:.2f} × "
        "faster than the better one",
        found["rows"],
        [
            ("fetched ÷ computed", number("ratio", 2)),
            ("GB/s at most", number("bytes_s", 2, 1e9)),
            *((way, number(f"{way}_ms")) for way in ways),
            ("which", lambda row: ", ".join(dict.fromkeys(row["chosen"]))),
        ],
    )
    yield _table(
        "Both at once: pages by how they came, ms, and what was reckoned",
        [row["met"] | {"ratio": row["ratio"]} | row["reckoned_ms"] for row in found["rows"]],
        [
            ("fetched ÷ computed", number("ratio", 2)),
            ("computed", number("computed_pages")),
            ("fetched", number("fetched_pages")),
            ("overtaken", number("overtaken_pages")),
            ("took", number("ms")),
            ("model busy", number("model_ms")),
            *((f"{way}, reckoned", number(way)) for way in ways[:3]),
        ],
    )


def _copies(found: Result) -> Iterable[RenderableType]:
    yield _table(
        "Copies: GB/s beside plain copies of pinned memory",
        found["link"],
        [
            ("page", text("page_size")),
            ("way", text("way")),
            ("order", text("order")),
            ("GB/s", number("bytes_s", 1, 1e9)),
            ("plain", number("plain_bytes_s", 1, 1e9)),
            ("of plain", share("share", 1)),
        ],
    )
    yield _table(
        "Decoding while copies fill the link: ms from token to token",
        found["beside"],
        [
            ("requests", text("batch")),
            ("context", number("context")),
            ("alone", number("alone_ms", 2)),
            *((f"{way}s", _slower(way)) for way in ("load", "backup")),
            ("both", _slower("both")),
            ("GB/s both", number("both_bytes_s", 1, 1e9)),
        ],
    )
    yield _table(
        "Nothing reused: tokens a second",
        found["fresh"],
        [
            ("tiers", text("tiers")),
            ("with them", number("tokens_s")),
            ("without", number("off_tokens_s")),
            ("share", share("share", 1)),
        ],
    )


def _slower(way: str) -> Show:
    return lambda row: f"{row[f'{way}_ms']:.2f} ({row[f'{way}_slower']:+.1%})"


def _sets(rows: list[Result]) -> Iterable[RenderableType]:
    if not rows:
        return
    shared = [("set ÷ device", number("times_device", 1)), ("tiers", text("tiers"))]
    rounds = range(len(rows[0]["rounds"]))
    yield _table(
        "Sessions, round by round: reused, ms to the first token in the mean, requests a second",
        rows,
        [*shared, *((f"round {i + 1}", _round(i)) for i in rounds)],
    )
    alone = {row["times_device"]: row for row in rows if row["tiers"] == "L1"}

    def times(name: str) -> Callable[[Result], float]:
        return lambda row: later(row, name) / later(alone[row["times_device"]], name)

    throughput, first = times("requests_s"), times("ttft_s")
    yield _table(
        "The same beside the device alone, from the second round on",
        [row for row in rows if alone[row["times_device"]] is not row],
        [
            *shared,
            ("reused", lambda row: f"{later(row, 'hit'):.0%}"),
            ("throughput", lambda row: f"{throughput(row):.1f} ×"),
            ("first token", lambda row: f"{first(row) - 1:+.0%}"),
        ],
    )


def _round(number: int) -> Show:
    def show(row: Result) -> str:
        one = row["rounds"][number]
        return f"{one['hit']:.0%}  {one['ttft_s'] * 1e3:,.0f}  {one['requests_s']:.2f}"

    return show
