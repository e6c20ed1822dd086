"""The result of `quire bench hybrid` as tables. Knows its JSON shape, measures nothing."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from evidence.cost import cost_table, differences, percent
from evidence.hybrid.overhead import WITH, WITHOUT
from evidence.targets import reached, verdict
from quire.bench.report import load, number
from quire.bench.ttft.report import hits_table
from quire.sizes import format_bytes

Result = dict[str, Any]

_MIN_PAIRS = 6
"""Of fewer pairs even the whole range is no interval of 95 % for their median."""


def tables(result: Result) -> list[RenderableType]:
    items: list[RenderableType] = [escape(describe(result))]
    if "hits" in result:
        items += _hits(result["hits"], result["tokens"], result["targets"]["speedup"])
    if "overhead" in result:
        items += _overhead(result["overhead"], result)
    items.append(load(result["load"]["before"][0], result["load"]["after"][0]))
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
    slowest = hits["slowest_hit_speedup"]
    note = (
        f"A hit in L2 or L3 is at least {slowest:.1f} times faster than computing, in the median; "
        f"{target:g} is {reached(slowest >= target)}."
    )
    return [*hits_table(hits, num_tokens, ("by CPU time", number("cpu_speedup", 1))), note]


def _overhead(cost: Result, result: Result) -> list[RenderableType]:
    target, sides = result["targets"]["overhead"], {WITH: "snapshots on", WITHOUT: "off"}
    items = [cost_table(cost, result["tokens"], result["output_tokens"], sides)]
    for what, key in (("a request's time", "total_s"), ("its CPU time", "cpu_s")):
        pairs = cost[key]["ratio"]["of_pairs"]
        items.append(
            f"Pair by pair, snapshots cost {percent(pairs['ratio'])} of {what}. "
            f"At most {target * 100:g} % is {_verdict(pairs, target, cost['rounds'])}."
        )
    return items + differences(cost)


def _verdict(ratio: Result, target: float, num_pairs: int) -> str:
    if num_pairs < _MIN_PAIRS:
        return f"[yellow]undecided[/]: that takes at least {_MIN_PAIRS} --rounds"
    return verdict(ratio, target)
