"""The result of `quire bench hybrid` as tables. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from evidence.hybrid.overhead import WITH, WITHOUT
from quire.bench.report import count_of, new_table, percent, verdict
from quire.sizes import format_bytes

Result = dict[str, Any]

_ROWS = (
    ("request, s", "total_s"),
    ("first token, s", "ttft_s"),
    ("CPU time, s", "cpu_s"),
)
_MIN_PAIRS = 6
"""Of fewer pairs even the whole range is no interval of 95 % for their median."""


def tables(result: Result) -> list[RenderableType]:
    items: list[RenderableType] = [escape(describe(result))]
    if "hits" in result:
        items += _hits(result["hits"], result["tokens"], result["targets"]["speedup"])
    if "overhead" in result:
        items += _overhead(result["overhead"], result)
    before, after = result["load"]["before"][0], result["load"]["after"][0]
    items.append(f"Load of the machine before and after: {before:.1f}, {after:.1f}.")
    return items


def describe(result: Result) -> str:
    model = result["model"]
    layers = ", ".join(f"{count} {kind}" for kind, count in model["layers"].items() if count)
    text = (
        f"{model['name']}, {model['parameters'] / 1e6:.0f} M parameters, layers: {layers}; "
        f"{result['threads']} threads on {result['cores']} cores"
    )
    if model["snapshot_bytes"]:
        worth = model["snapshot_bytes"] / model["full_bytes_per_token"]
        text += (
            f"; a snapshot of {format_bytes(model['snapshot_bytes'])} weighs as much as the keys "
            f"and values of {worth:,.0f} tokens"
        )
    return text


def _hits(hits: Result, num_tokens: int, target: float) -> list[RenderableType]:
    table = new_table(f"Time to first token of a prompt of {num_tokens:,} tokens")
    table.add_column("found in")
    for name in ("median, ms", "times faster", "seen", "by CPU time", "right tier", "same answer"):
        table.add_column(name, justify="right")
    for name, case in hits["cases"].items():
        is_cold = name == "cold"
        table.add_row(
            "computed" if is_cold else name,
            f"{case['ttft_s'] * 1000:,.0f}",
            "" if is_cold else f"{case['speedup']:.1f}",
            "" if is_cold else f"{case['speedup_min']:.1f}–{case['speedup_max']:.1f}",
            "" if is_cold else f"{case['cpu_speedup']:.1f}",
            count_of(case["as_meant"], case["of"]),
            count_of(case["same_answer"], case["of"]),
        )
    samples = [
        f"  {name:4} "
        + "  ".join(f"{s['ttft_s'] * 1000:,.0f}" for s in hits["samples"] if s["case"] == name)
        for name in hits["cases"]
    ]
    slowest = hits["slowest_hit_speedup"]
    reached = "reached" if slowest >= target else "[bold red]missed[/]"
    note = (
        f"A hit in L2 or L3 is at least {slowest:.1f} times faster than computing, in the median; "
        f"{target:g} is {reached}."
    )
    return [table, "All samples, ms", *samples, note]


def _overhead(cost: Result, result: Result) -> list[RenderableType]:
    target = result["targets"]["overhead"]
    table = new_table(
        f"Nothing reused: {cost['rounds']} unique prompts of {result['tokens']:,} tokens, "
        f"{result['output_tokens']} generated"
    )
    table.add_column("")
    for name in ("snapshots on", "off", "medians", "pairs", "95 % interval"):
        table.add_column(name, justify="right")
    for name, key in _ROWS:
        row = cost[key]
        pairs = row["ratio"]["of_pairs"]
        table.add_row(
            name,
            f"{row[WITH]['p50']:.3f}",
            f"{row[WITHOUT]['p50']:.3f}",
            percent(row["ratio"]["of_medians"]["ratio"]),
            percent(pairs["ratio"]),
            f"{percent(pairs['low'])[:-2]} … {percent(pairs['high'])}",
        )
    items: list[RenderableType] = [table]
    for what, key in (("a request's time", "total_s"), ("its CPU time", "cpu_s")):
        pairs = cost[key]["ratio"]["of_pairs"]
        items.append(
            f"Pair by pair, snapshots cost {percent(pairs['ratio'])} of {what}. "
            f"At most {target * 100:g} % is {_verdict(pairs, target, cost['rounds'])}."
        )
    if cost["same_answer"] != cost["rounds"]:
        items.append(f"[bold red]{cost['rounds'] - cost['same_answer']} answers differ.[/]")
    if cost["reused_tokens"]:
        items.append(f"[bold red]{cost['reused_tokens']} tokens were reused after all.[/]")
    return items


def _verdict(ratio: Result, target: float, num_pairs: int) -> str:
    if num_pairs < _MIN_PAIRS:
        return f"[yellow]undecided[/]: that takes at least {_MIN_PAIRS} --rounds"
    return verdict(ratio, target)
