"""The result of `quire bench ttft` as tables for people. Knows its JSON shape, measures nothing.

What a hit in each tier saves, and what something costs when nothing is reused, are also tables of
other benchmarks: `hits_table`, `cost_table`, `differences`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from quire.bench.report import Show, count_of, number, percent, table, text
from quire.bench.ttft.overhead import WITH, WITHOUT
from quire.bench.ttft.run import describe

Result = dict[str, Any]

_ROWS = (
    ("request, s", "total_s"),
    ("first token, s", "ttft_s"),
    ("CPU time, s", "cpu_s"),
)
_KINDS = {"medians": "of_medians", "pairs": "of_pairs"}


def tables(result: Result) -> list[RenderableType]:
    items: list[RenderableType] = [escape(describe(result))]
    if "hits" in result:
        hits = result["hits"]
        items += hits_table(hits, hits["prompt_tokens"])
        slowest = hits["slowest_hit_speedup"]
        items.append(f"The slowest hit is {slowest:.1f} times faster than computing.")
    if "overhead" in result:
        items += _overhead(result["overhead"])
    return items


def hits_table(hits: Result, num_tokens: float, *more: tuple[str, Show]) -> list[RenderableType]:
    """With every sample below. `more`: columns about hits."""

    def of_hit(show: Show) -> Show:
        return lambda row: "" if row["name"] == "cold" else show(row)

    shown = table(
        f"Time to first token of a prompt of {num_tokens:,.0f} tokens",
        [case | {"name": name} for name, case in hits["cases"].items()],
        [
            ("found in", lambda row: "computed" if row["name"] == "cold" else row["name"]),
            ("median, ms", number("ttft_s", 0, 1e-3)),
            ("times faster", of_hit(number("speedup", 1))),
            ("seen", of_hit(lambda row: f"{row['speedup_min']:.1f}–{row['speedup_max']:.1f}")),
            *((name, of_hit(show)) for name, show in more),
            ("right tier", lambda row: count_of(row["as_meant"], row["of"])),
            ("same answer", lambda row: count_of(row["same_answer"], row["of"])),
        ],
    )
    samples = [
        f"  {name:4} "
        + "  ".join(f"{s['ttft_s'] * 1000:,.0f}" for s in hits["samples"] if s["case"] == name)
        for name in hits["cases"]
    ]
    return [shown, "All samples, ms", *samples]


def cost_table(
    cost: Result, num_tokens: int, output_tokens: int, sides: Mapping[str, str]
) -> RenderableType:
    """`sides`: with and without, and how they are called."""

    def middle(side: str) -> Show:
        return lambda row: f"{row[side]['p50']:.3f}"

    def ratio(kind: str) -> Show:
        return lambda row: percent(row["ratio"][kind]["ratio"])

    def interval(row: Result) -> str:
        pairs = row["ratio"]["of_pairs"]
        return f"{percent(pairs['low'])[:-2]} … {percent(pairs['high'])}"

    return table(
        f"Nothing reused: {cost['rounds']} unique prompts of {num_tokens:,} tokens, "
        f"{output_tokens} generated",
        [cost[key] | {"name": name} for name, key in _ROWS],
        [
            ("", text("name")),
            *((name, middle(side)) for side, name in sides.items()),
            *((name, ratio(kind)) for name, kind in _KINDS.items()),
            ("95 % interval", interval),
        ],
    )


def differences(cost: Result) -> list[RenderableType]:
    """What makes the figures worthless."""
    items: list[RenderableType] = []
    if cost["same_answer"] != cost["rounds"]:
        items.append(f"[bold red]{cost['rounds'] - cost['same_answer']} answers differ.[/]")
    if cost["reused_tokens"]:
        items.append(f"[bold red]{cost['reused_tokens']} tokens were reused after all.[/]")
    return items


def _overhead(cost: Result) -> list[RenderableType]:
    sides = {WITH: "L2+L3 on", WITHOUT: "off"}
    pairs = cost["total_s"]["ratio"]["of_pairs"]
    note = (
        f"Pair by pair, the lower tiers cost {percent(pairs['ratio'])} of a request's time "
        f"(95 % interval {percent(pairs['low'])} to {percent(pairs['high'])}). Copies and writes "
        f"end {cost['settled_s']['p50'] * 1000:.0f} ms after the answer."
    )
    shown = cost_table(cost, cost["prompt_tokens"], cost["output_tokens"], sides)
    return [shown, note, *differences(cost)]
