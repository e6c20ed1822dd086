"""`quire bench gpu` as tables for people: every figure beside its floor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import RenderableType

from quire.bench.gpu.plan import GpuPart
from quire.bench.gpu.sets import later
from quire.bench.report import new_table

Result = dict[str, Any]


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
    failed = [f"{part} could not be measured: {why}" for part, why in result["failed"].items()]
    shown = (table for show, rows in found for table in show(rows))
    took = ", ".join(f"{part} {seconds:.0f}" for part, seconds in result["took_s"].items())
    return [head, *shown, *_asked(result["asked"]), f"Seconds of each part: {took}", *failed]


def all_tables(result: Result) -> list[RenderableType]:
    """Of every shape."""
    return [table for one in result["shapes"] for table in tables(one)]


Columns = dict[str, Callable[[Result], str]]


def _table(title: str, rows: Iterable[Result], columns: Columns) -> RenderableType:
    table = new_table(title)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    return table


def _number(name: str, digits: int = 0, scale: float = 1.0) -> Callable[[Result], str]:
    """Of that name, in so many of its units; nothing if it was not measured."""
    return lambda row: f"{row[name] / scale:,.{digits}f}" if name in row else "–"


def _share(name: str, digits: int = 0) -> Callable[[Result], str]:
    return lambda row: f"{row[name]:.{digits}%}"


def _text(name: str) -> Callable[[Result], str]:
    return lambda row: str(row[name])


def _decode(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "Decoding: ms from token to token",
        rows,
        {
            "requests": _text("batch"),
            "context": _number("context"),
            "greedy": _number("greedy_ms", 2),
            "floor": _number("floor_ms", 2),
            "of the floor": _share("share_of_floor"),
            "drawn": _number("drawn_ms", 2),
            "drawn ÷ greedy": lambda row: f"{row['drawn_ms'] / row['greedy_ms']:.2f}",
        },
    )


def _prompts(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "Prompts: ms to the first token",
        rows,
        {
            "tokens": _number("tokens"),
            "chunk": _number("chunk"),
            "took": _number("ms"),
            "floor": _number("floor_ms"),
            "of the floor": _share("share_of_floor"),
            "TFLOP/s": _number("tflops"),
        },
    )


def _mixed(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "A prompt beside others that decode: ms, and what it adds to their time",
        rows,
        {
            "decoding": _text("batch"),
            "prompt": _number("tokens"),
            "chunk": _number("chunk"),
            "token alone": _number("alone_ms", 2),
            "slowest": _number("slowest_ms", 1),
            "chunk alone": _number("last_chunk_ms", 1),
            "later ÷ chunk": _number("times_chunk", 2),
            "added in all": _number("added_ms"),
            "prompt alone": _number("own_ms"),
            "ratio": _number("times_own", 2),
        },
    )


def _hits(rows: list[Result]) -> Iterable[RenderableType]:
    yield _table(
        "Hits: ms to the first token, by where the prompt was",
        rows,
        {
            "tokens": _number("tokens"),
            "nowhere": _number("computed_ms"),
            "device": _number("device_ms", 1),
            "and some more": _number("more_ms", 1),
            "host": _number("host_ms", 1),
            "host's floor": _number("floor_ms", 1),
            "store": _number("store_ms", 1),
            "store's floor": _number("store_floor_ms", 1),
        },
    )


def _crossover(found: Result) -> Iterable[RenderableType]:
    ways = ("compute", "fetch", "both", "chosen")
    yield _table(
        f"A prompt of {found['tokens']:,} tokens in the store, ms to the first token: the choice "
        f"was right in {found['right_share']:.0%}, both at once up to {found['best_gain']:.2f} × "
        "faster than the better one",
        found["rows"],
        {
            "fetched ÷ computed": _number("ratio", 2),
            "GB/s at most": _number("bytes_s", 2, 1e9),
            **{way: _number(f"{way}_ms") for way in ways},
            "which": lambda row: ", ".join(dict.fromkeys(row["chosen"])),
        },
    )
    yield _table(
        "Both at once: pages by how they came, ms, and what was reckoned",
        [row["met"] | {"ratio": row["ratio"]} | row["reckoned_ms"] for row in found["rows"]],
        {
            "fetched ÷ computed": _number("ratio", 2),
            "computed": _number("computed_pages"),
            "fetched": _number("fetched_pages"),
            "overtaken": _number("overtaken_pages"),
            "took": _number("ms"),
            "model busy": _number("model_ms"),
            **{f"{way}, reckoned": _number(way) for way in ways[:3]},
        },
    )


def _copies(found: Result) -> Iterable[RenderableType]:
    yield _table(
        "Copies: GB/s beside plain copies of pinned memory",
        found["link"],
        {
            "page": _text("page_size"),
            "way": _text("way"),
            "order": _text("order"),
            "GB/s": _number("bytes_s", 1, 1e9),
            "plain": _number("plain_bytes_s", 1, 1e9),
            "of plain": _share("share", 1),
        },
    )
    yield _table(
        "Decoding while copies fill the link: ms from token to token",
        found["beside"],
        {
            "requests": _text("batch"),
            "context": _number("context"),
            "alone": _number("alone_ms", 2),
            **{f"{way}s": _slower(way) for way in ("load", "backup")},
            "both": _slower("both"),
            "GB/s both": _number("both_bytes_s", 1, 1e9),
        },
    )
    yield _table(
        "Nothing reused: tokens a second",
        found["fresh"],
        {
            "tiers": _text("tiers"),
            "with them": _number("tokens_s"),
            "without": _number("off_tokens_s"),
            "share": _share("share", 1),
        },
    )


def _slower(way: str) -> Callable[[Result], str]:
    return lambda row: f"{row[f'{way}_ms']:.2f} ({row[f'{way}_slower']:+.1%})"


def _sets(rows: list[Result]) -> Iterable[RenderableType]:
    if not rows:
        return
    shared: Columns = {"set ÷ device": _number("times_device", 1), "tiers": _text("tiers")}
    rounds = range(len(rows[0]["rounds"]))
    yield _table(
        "Sessions, round by round: reused, ms to the first token in the mean, requests a second",
        rows,
        shared | {f"round {i + 1}": _round(i) for i in rounds},
    )
    alone = {row["times_device"]: row for row in rows if row["tiers"] == "L1"}

    def times(name: str) -> Callable[[Result], float]:
        return lambda row: later(row, name) / later(alone[row["times_device"]], name)

    throughput, first = times("requests_s"), times("ttft_s")
    yield _table(
        "The same beside the device alone, from the second round on",
        [row for row in rows if alone[row["times_device"]] is not row],
        shared
        | {
            "reused": lambda row: f"{later(row, 'hit'):.0%}",
            "throughput": lambda row: f"{throughput(row):.1f} ×",
            "first token": lambda row: f"{first(row) - 1:+.0%}",
        },
    )


def _round(number: int) -> Callable[[Result], str]:
    def show(row: Result) -> str:
        one = row["rounds"][number]
        return f"{one['hit']:.0%}  {one['ttft_s'] * 1e3:,.0f}  {one['requests_s']:.2f}"

    return show


def _asked(figures: list[Result]) -> Iterable[RenderableType]:
    """Of an H200 and 8 billion parameters; elsewhere a yardstick."""
    if not figures:
        return
    met = sum(figure["met"] for figure in figures)
    yield _table(
        f"Asked of one H200: {met} of {len(figures)} met",
        figures,
        {
            "part": _text("part"),
            "figure": _text("name"),
            "asked": lambda row: f"{'≥' if row['at_least'] else '≤'} {_in_unit(row, 'asked')}",
            "got": lambda row: _in_unit(row, "got"),
            "met": lambda row: "yes" if row["met"] else "[bold red]no[/]",
        },
    )


def _in_unit(row: Result, name: str) -> str:
    if row["unit"] == "%":
        return f"{row[name]:.1%}"
    return f"{row[name]:.2f} {row['unit']}"
